"""Plug-ins: what runs inside an engine's process; everything else runs beside it.

vllm                vLLM's side: registers the publisher `kvplug`
sglang              SGLang's side: the same
connector_events    what a KV connector of vLLM says of CXL pools and experts
kv_event_publisher  the same for engines of one's own, with the checks in publisher_arguments
settings            what they were started with
about_engine        what an engine is

sender_process      the engine's end of the process that publishes its events; nothing else that
                    takes time runs in the engine
sender_messages     what the two say to each other
sender              that process: engines' events, or notes of them, to one of the two wires

life_stream         our own wire: batches to messages, without holding up whoever hands them over
event_stream        these over ZMQ sockets
nats_stream         these over NATS, by outbox into a stream; beats, nats_answers: the rest of it
nats_target         where on NATS, and by which name; nats_task: the work in its loop
answers             answers to followers that join late or missed something
answer_maker        what these say
life                what has been said, and what there is to say to a newcomer
block_hashes        token ids to sequence hashes, without Numba
resident_set        what the engine holds: with resident_blocks, resident_groups, resident_pools
listing             all of that as packed events

numbered_batches    the stock wire: numbers, whatever carries them; stock_pools: CXL pools on it
publisher           these over ZMQ sockets; nats_batches: over NATS
replay_server       past batches of it again
binding, wake       a socket and its address, tried again while it is taken; a thread that waits

vllm_recorder       what vLLM's block pool does, noted; vllm_prompts: its tokens; vllm_notes: the
                    notes as vLLM's own events; vllm_guard: whether it may
sglang_recorder     the same of SGLang's trees; sglang_notes, sglang_guard; sglang_scheduler: when

An engine is imported only inside functions, and Numba nowhere: vLLM 0.32 for the CPU does not start
in a process that has loaded it (docs/decisions.md, 10).
"""
