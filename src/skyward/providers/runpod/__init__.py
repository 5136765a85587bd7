"""RunPod: containers with and without GPUs, on its own and on other people's hardware, billed from a balance."""
