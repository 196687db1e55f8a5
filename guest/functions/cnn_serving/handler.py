"""FunctionBench's cnn_image_classification: SqueezeNet classifies a JPEG picture.

The paper uses TensorFlow. This function uses torchvision's SqueezeNet 1.1, which is the same
network, with random weights from a seed.
"""

import torch
from torchvision import models, transforms

from network import most_likely, seeded
from picture import file_of, opened

torch.set_num_threads(1)
NETWORK = seeded(models.squeezenet1_1(), seed=11)
PREPARE = transforms.Compose([
    transforms.Resize((227, 227)),
    transforms.ToTensor(),
    transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
])


def handler(event, context):
    data = file_of(event)
    with opened(data) as image, torch.no_grad():
        logits = NETWORK(PREPARE(image).unsqueeze(0))[0]
    return {"bytes": len(data), **most_likely(logits)}
