"""Steps of a state machine with a follower whose asks a model answers, in pieces and late."""

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule


class AnsweredFollower(RuleBasedStateMachine):
    """Of whoever has `now_s`, `follower`, `answer` and `take_request`, which sets `answer`."""

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.0, 6.0, 31.0]))
    def wait(self, seconds):
        self.now_s += seconds
        self.follower.tick()

    @rule(count=st.integers(1, 3))
    def answer_in_part(self, count):
        self.take_request()
        if self.answer:
            part, self.answer = self.answer[:count], self.answer[count:]
            self.follower.replayed(part)

    @rule()
    def answer_fully(self):
        self.take_request()
        if self.answer is not None:
            request, answer, self.answer = self.follower.replay_request, self.answer, []
            self.follower.replayed(answer)
            if self.follower.replay_request is request:
                self.follower.replay_ended()
