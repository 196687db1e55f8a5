"""Networks with the architectures of the papers and random weights from a seed, because none can be
downloaded.

Weights are integers scaled by powers of two, so they are the same on every machine.
"""

import math

import numpy
import torch


def seeded(network, seed):
    """`network` with random weights, ready for inference."""
    random = numpy.random.Generator(numpy.random.PCG64(seed))
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.dim() > 1:
                # Uniform, with the variance that preserves the scale of activations (He et al.,
                # 2015).
                bound = math.sqrt(6 / parameter[0].numel())
                drawn = random.random(parameter.numel(), dtype=numpy.float32).reshape(parameter.shape)
                parameter.copy_(torch.from_numpy(drawn).mul_(2 * bound).sub_(bound))
            elif name.endswith("bias"):
                parameter.zero_()
            elif name.endswith("bn3.weight"):
                # The last layer of a residual block adds little, as in a trained network.
                parameter.fill_(0.25)
    return network.eval()


def most_likely(logits):
    """The class and its probability."""
    likely = torch.softmax(logits.double(), dim=0)
    best = int(likely.argmax())
    return {"class": best, "probability": round(float(likely[best]), 6)}
