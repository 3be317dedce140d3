"""Rewrites of FX graphs: an unsharded region graph and its layout come in, what one rank runs goes out."""
