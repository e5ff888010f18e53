"""Versions of the compilers of accelerators."""

from __future__ import annotations

import importlib.metadata

from ptxas import tool_version

_PACKAGES = {"tpu": ("jax", "jaxlib", "libtpu"), "cuda": ("jax", "jaxlib", "jax-cuda12-plugin")}
_TOOLS = {"tpu": (), "cuda": ("ptxas", "nvdisasm")}


def compiler_versions(platform: str) -> str:
    """Returns the versions of the compilers of a platform, ``"tpu"`` or ``"cuda"``, as a line of text."""
    found = [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES[platform]]
    return ", ".join(found + [f"{name} {tool_version(name)}" for name in _TOOLS[platform]])
