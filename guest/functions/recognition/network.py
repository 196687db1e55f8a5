"""Networks with the architectures of the papers and weights made here from a seed, since none can be downloaded.

Weights are whole numbers scaled by powers of two, so they are the same on every machine.
"""

import math

import numpy
import torch


def seeded(network, seed):
    """`network` with its weights drawn, ready to infer."""
    random = numpy.random.Generator(numpy.random.PCG64(seed))
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.dim() > 1:
                # Uniform, of the variance that keeps the size of activations (He et al., 2015).
                bound = math.sqrt(6 / parameter[0].numel())
                drawn = random.random(parameter.numel(), dtype=numpy.float32).reshape(parameter.shape)
                parameter.copy_(torch.from_numpy(drawn).mul_(2 * bound).sub_(bound))
            elif name.endswith("bias"):
                parameter.zero_()
            elif name.endswith("bn3.weight"):
                # The last of a residual block adds little, as in a trained network.
                parameter.fill_(0.25)
    return network.eval()


def most_likely(logits):
    """The class and its probability."""
    likely = torch.softmax(logits.double(), dim=0)
    best = int(likely.argmax())
    return {"class": best, "probability": round(float(likely[best]), 6)}
