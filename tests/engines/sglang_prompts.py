"""What SGLang makes of bodies; runs in SGLang's environment, without a server.

In:  on stdin, JSON: a list of {"folder", "kind", "body"}; "folder" is of a model. Perhaps also the
     name of a reasoning "parser".
Out: on stdout, JSON: for each the token ids of the prompt, of a batch of the first one; null where
     SGLang refuses the body.
"""

import asyncio
import json
import sys
from types import SimpleNamespace

from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
)
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
from sglang.srt.parser.template_manager import TemplateManager
from sglang.srt.runtime_context import publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

NO_REQUEST = SimpleNamespace(headers={})


class Manager:
    """What the serving classes ask of a TokenizerManager."""

    def __init__(self, folder, parser):
        self.server_args = ServerArgs(model_path=folder, device="cpu", reasoning_parser=parser)
        publish(self.server_args, role="test")
        self.tokenizer, self.processor = get_tokenizer(folder), None
        self.model_path = self.served_model_name = folder
        config = SimpleNamespace(model_type="llama", architectures=["LlamaForCausalLM"])
        self.model_config = SimpleNamespace(
            hf_config=config,
            is_multimodal=False,
            get_default_sampling_params=dict,
        )

    def config_value(self, name):
        return getattr(self.server_args, name)


class Served:
    """A model as SGLang serves it."""

    def __init__(self, folder, parser):
        self.manager = Manager(folder, parser)
        templates = TemplateManager()
        templates.load_chat_template(self.manager, None, folder)
        self.chat = OpenAIServingResponses(self.manager, templates)
        self.completion = OpenAIServingCompletion(self.manager, templates)
        self.messages = AnthropicServing(self.chat)

    def ids_of(self, kind, body):
        body = {"model": "m", "max_tokens": 1, **body}
        if kind == "completion":
            return self._of_completion(CompletionRequest(**body))
        if kind == "chat":
            return self._of_chat(ChatCompletionRequest(**body))
        if kind == "messages":
            request = AnthropicMessagesRequest(**body)
            return self._of_chat(self.messages._convert_to_chat_completion_request(request))
        request = ResponsesRequest(**{k: v for k, v in body.items() if k != "max_tokens"})
        made = self.chat._make_request(request, None, self.manager.tokenizer)
        return asyncio.run(made)[3].prompt_ids

    def _of_chat(self, request):
        if error := self.chat._validate_request(request):
            raise ValueError(error)
        return self.chat._convert_to_internal_request(request, NO_REQUEST)[0].input_ids

    def _of_completion(self, request):
        made = self.completion._convert_to_internal_request(request, NO_REQUEST)[0]
        if made.input_ids is not None:
            is_batch = isinstance(made.input_ids[0], list)
            return made.input_ids[0] if is_batch else made.input_ids
        texts = [made.text] if isinstance(made.text, str) else made.text
        return self.manager.tokenizer(texts)["input_ids"][0]


def main():
    served = {}
    answers = []
    for case in json.load(sys.stdin):
        folder, parser = case["folder"], case.get("parser")
        try:
            if (folder, parser) not in served:
                served[folder, parser] = Served(folder, parser)
            answers.append(list(served[folder, parser].ids_of(case["kind"], case["body"])))
        except Exception as error:  # noqa: BLE001 - whatever it refuses with
            sys.stderr.write(f"{case['kind']} {case['body']}: {error!r}\n")
            answers.append(None)
    json.dump(answers, sys.stdout)


main()
