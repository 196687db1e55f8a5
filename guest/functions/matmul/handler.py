"""FunctionBench's matmul: multiplies two square matrices of random numbers, with numpy.

The numbers are small integers, so the product is exact in any order of summation.
"""

import numpy


def handler(event, context):
    size = event["size"]
    random = numpy.random.Generator(numpy.random.PCG64(event["seed"]))
    left, right = (random.integers(-99, 100, (size, size)).astype(numpy.float64) for _ in range(2))
    product = numpy.matmul(left, right)
    return {"size": size, "trace": int(numpy.trace(product)), "sum": int(product.sum()), "last": int(product[-1, -1])}
