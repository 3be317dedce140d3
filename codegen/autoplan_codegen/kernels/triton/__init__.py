"""Triton kernels in, called by the operators of the package above where the device runs Triton.

Import a module of this package only where Triton can be imported: ``operators.launcher`` does.
"""
