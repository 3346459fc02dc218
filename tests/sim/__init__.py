"""The simulated accelerator itself."""
