"""Compares the bits of one training on several numbers of GPUs and within several memories."""
