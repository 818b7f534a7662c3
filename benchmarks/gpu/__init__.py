"""Training steps of ResNet-152 on a GPU: ``python -m benchmarks.gpu`` measures them."""
