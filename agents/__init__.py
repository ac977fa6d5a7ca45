"""The policy's side of an episode: messages to tokens and back, tools, the turn loop.

- `loop`: the agent, on one page; how episodes end, and their budgets.
- `conversation`: the append-only token stream that is trained on.
- `policy`: what a policy is; `vllm` is one behind a server, `scripted` says what it was told to.
- `chat`: a model family's format, through `renderers`; `tokenizer` keeps outside text from forging markers.
- `tools`: shell, editor, submit; `prompts/` holds the words, in files a person can edit.
"""
