"""This machine measured: kernels and collectives timed here in, a hardware profile of it out."""
