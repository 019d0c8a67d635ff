"""Tensors in, bytes out: codecs by name, and the framing that carries them."""
