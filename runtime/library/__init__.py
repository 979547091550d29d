"""Libraries of others that kernels of a bundle may call."""
