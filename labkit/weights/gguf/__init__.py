"""GGUF files: their tensors by Hugging Face's names, and their codes as an engine keeps them.

`header` reads a file's header within bounds, and `metadata` gives values by type. `config` describes the model:
`architectures` and `mixtures` say which fields each architecture has, `described` has what they share. `tokenizer`
reads the vocabulary, with the `splits` of text. `file` opens all parts and finds tensors. `tensors` gives them as
floats or codes, and makes canonical weights of them without quantising anew.
"""
