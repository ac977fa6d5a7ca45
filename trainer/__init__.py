"""Episodes to gradients. Only the model to begin with exists yet; the step loop and the losses do not.

- `tiny_model`: a small random model of a real architecture (GLM-4.5, Qwen3, Llama 3), as a directory.
- `tiny_tokenizer`: its thousand-token vocabulary, with the family's own markers.
"""
