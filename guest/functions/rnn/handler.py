"""FunctionBench's rnn_generate_character_level: a recurrent network generates names in a language,
letter by letter.

FunctionBench loads a trained network from a file. This function uses random weights from a seed, so
its names are meaningless.
"""

import string

import torch
from torch import nn

from network import seeded

LANGUAGES = 18
LETTERS = string.ascii_letters + " .,;'-"
END = len(LETTERS)

torch.set_num_threads(1)


class Rnn(nn.Module):
    """The network of PyTorch's tutorial on generating names, which FunctionBench uses."""

    def __init__(self, size=128):
        super().__init__()
        self.hidden = nn.Linear(LANGUAGES + END + 1 + size, size)
        self.output = nn.Linear(LANGUAGES + END + 1 + size, END + 1)
        self.mixed = nn.Linear(size + END + 1, END + 1)

    def forward(self, language, letter, hidden):
        joined = torch.cat((language, letter, hidden))
        hidden = torch.tanh(self.hidden(joined))
        return self.mixed(torch.cat((hidden, self.output(joined)))), hidden


NETWORK = seeded(Rnn(), seed=18)


def one_hot(size, at):
    return torch.zeros(size).index_fill_(0, torch.tensor(at), 1)


def name(language, start, longest):
    hidden = torch.zeros(128)
    made = start
    while len(made) < longest:
        logits, hidden = NETWORK(one_hot(LANGUAGES, language), one_hot(END + 1, LETTERS.index(made[-1])), hidden)
        best = int(logits.argmax())
        if best == END:
            break
        made += LETTERS[best]
    return made


def handler(event, context):
    with torch.no_grad():
        names = [name(event["language"], start, event["longest"]) for start in event["start_letters"]]
    return {"names": names}
