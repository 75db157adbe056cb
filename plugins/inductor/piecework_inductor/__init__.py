"""Compile pieces with TorchInductor, which is imported when the first piece asks for it."""

PIECEWORK_PLUGIN_API = 1
