"""FunctionBench's and SeBS's image recognition: ResNet-50 classifies a JPEG picture.

The architecture is torchvision's. The weights are random, so the class is meaningless, but the work
is that of a trained network.
"""

import torch
from torchvision import models, transforms

from network import most_likely, seeded
from picture import file_of, opened

torch.set_num_threads(1)
NETWORK = seeded(models.resnet50(), seed=50)


def handler(event, context):
    data = file_of(event)
    size = event.get("size", 224)
    prepare = transforms.Compose([
        transforms.Resize(size * 8 // 7),
        transforms.CenterCrop(size),
        transforms.ToTensor(),
        transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
    ])
    with opened(data) as image, torch.no_grad():
        logits = NETWORK(prepare(image).unsqueeze(0))[0]
    return {"bytes": len(data), **most_likely(logits)}
