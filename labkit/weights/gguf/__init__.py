"""GGUF files: their tensors by Hugging Face's names, and their codes as an engine keeps them.

`file` opens one and finds its tensors, `tensors` gives them as floats or codes, and `native` makes canonical weights of
them without quantising anew.
"""
