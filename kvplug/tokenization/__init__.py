"""Text to token ids, as the engine does it: for the router, and for a simulated engine.

prompt_tokenizer   bodies of OpenAI's API -> token ids
prompt_kind        which API a body came by
messages_api       a body of /v1/messages -> a chat body, as vLLM makes it
responses_api      a body of /v1/responses -> a chat body, as vLLM makes it
media              images and sounds in a chat, and the text before the first one
model_folder       the files of a model -> its tokenizer and its chat templates
chat_template      the messages of a chat -> one text
chat_messages      messages, tools and options, in the form in which a template gets them
sglang_chat        the same for SGLang; sglang_messages, sglang_responses: bodies of other APIs
content_format     which form of content a template reads
template_environment   what templates run in
piece_encoder      one text -> token ids; pieces that were seen before are not tokenized again
cuts               where a text may be cut so that the pieces have the ids of the whole
text_encoder       one piece -> token ids, by the faster of two libraries

Nothing here needs the kernels, so whoever only tokenizes waits for no compilation.
"""
