"""Rehearsals: the real compilers of accelerators that are not there, and what their programs say."""
