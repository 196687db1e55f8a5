"""FaaSMem's bert: BERT-base predicts the masked word of a sentence.

The architecture is that of Devlin et al., 2019 (12 layers of 768, 12 heads, 30,522 words of
vocabulary, 110 million weights), written with torch's own modules, with random weights from a seed.
"""

import torch
from torch import nn

from network import most_likely, seeded

VOCABULARY, POSITIONS, SIZE, HEADS, LAYERS, MASK = 30522, 512, 768, 12, 12, 103

torch.set_num_threads(1)


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, SIZE)
        self.positions = nn.Embedding(POSITIONS, SIZE)
        self.segments = nn.Embedding(2, SIZE)
        self.norm = nn.LayerNorm(SIZE, eps=1e-12)
        layer = nn.TransformerEncoderLayer(SIZE, HEADS, 4 * SIZE, activation="gelu", layer_norm_eps=1e-12, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS)

    def forward(self, tokens, asked):
        """Logits of the words of the vocabulary at position `asked`."""
        places = torch.arange(len(tokens))
        seen = self.words(tokens) + self.positions(places) + self.segments(torch.zeros_like(places))
        read = self.layers(self.norm(seen).unsqueeze(0))[0]
        return self.words.weight @ read[asked] * 3


NETWORK = seeded(Bert(), seed=12)


def handler(event, context):
    state = event["seed"]
    tokens = []
    for _ in range(event["tokens"]):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        tokens.append(1000 + (state >> 33) % (VOCABULARY - 1000))
    asked = len(tokens) // 2
    tokens[asked] = MASK
    with torch.no_grad():
        return {"tokens": len(tokens), **most_likely(NETWORK(torch.tensor(tokens), asked))}
