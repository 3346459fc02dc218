"""Random programs against plain autograd: loss, gradients and generator state, bit by bit."""
