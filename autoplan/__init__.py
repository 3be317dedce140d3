"""autoplan: plan, prove, draw and run the parallel training of a PyTorch model."""
