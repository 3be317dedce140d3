"""Published training runs in, how far the predictions are from them out."""
