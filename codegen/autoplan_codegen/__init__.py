"""Stage programs and scripts in, readable Python out: stage modules and edited training scripts."""
