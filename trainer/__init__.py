"""Episodes to gradients, gradients to weights.

- `advantages`: rewards of a group to advantages.
- `packing`: token streams to micro-batches, the same number for every rank.
- `scoring`: what the weights say of a micro-batch: `attention` within streams, `logprobs` in chunks.
- `loss`: IPO, IcePop, DPPO and the unmasked baseline; `loss_report`: what each mask makes of a batch.
- `model`: weights loaded, sharded and saved; `step`: one optimiser step, of either kind of training.
- `checkpoint`: all that a killed training needs to go on as if it had not been.
- `sft`: supervised training on the episodes of a run, as a process.
- `rl`: reinforcement learning on the batches that `swe-env train` makes, as a process.
- `processes`: what both begin with.
- `vllm_weights`: runs inside vLLM, and takes the weights that `rl` writes.
- `footprint`: what a model takes, for `swe-env plan`.
- `mask_plot`: draws which tokens each mask drops, for `docs/losses.md`.
- `tiny_model`: a small random model of a real architecture (GLM-4.5, Qwen3, Llama 3), as a directory.
- `tiny_copying`: such a model that begins able to copy.
- `tiny_tokenizer`: its thousand-token vocabulary, with the family's own markers.
"""
