"""Reimplements both forms of PyTorch's translation tutorial, as contenders of the recipe.

The classic form (2017) trains on one sentence at a time, token by token, with plain SGD and an attention over the first
ten positions. The present form (since 2023) trains on batches of 32 sentences, padded to ten tokens, also step by step,
with Adam and additive attention. Sizes, learning rates, dropout and losses are those of the tutorial.
"""

import random
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datamodules.translation.loaders import PackedPairs
from datamodules.translation.text import EOS, SOS

__all__ = ["ClassicTranslator", "PresentTranslator", "Translator"]


class Translator(Protocol):
    """Interface of both forms."""

    def train_on(self, pairs: PackedPairs, rows: Tensor) -> None:
        """Train on these pairs once, in this order."""

    def translate(self, pairs: PackedPairs, rows: Tensor) -> list[list[int]]:
        """Translate greedily, and return the token numbers without EOS."""


class _ClassicDecoder(nn.Module):
    def __init__(self, tokens: int, hidden: int, max_length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, hidden)
        self.attention = nn.Linear(2 * hidden, max_length)
        self.combine = nn.Linear(2 * hidden, hidden)
        self.dropout = nn.Dropout(0.1)
        self.recurrent = nn.GRU(hidden, hidden)
        self.output = nn.Linear(hidden, tokens)

    def forward(self, token: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Decode one token from the last token (1,), the state (1, 1, hidden) and the outputs (max_length, hidden)."""
        embedded = self.dropout(self.embedding(token))
        weights = torch.softmax(self.attention(torch.cat((embedded, hidden[0]), 1)), dim=1)
        context = weights @ memory
        inputs = F.relu(self.combine(torch.cat((embedded, context), 1)))
        outputs, hidden = self.recurrent(inputs.unsqueeze(0), hidden)
        return F.log_softmax(self.output(outputs[0]), dim=1), hidden


class ClassicTranslator:
    """Classic form: one sentence per step, with teacher forcing for half of the sentences."""

    def __init__(self, source_vocab_size: int, target_vocab_size: int, hidden: int = 256, max_length: int = 10) -> None:
        self.hidden = hidden
        self.max_length = max_length
        self.embedding = nn.Embedding(source_vocab_size, hidden)
        self.encoder = nn.GRU(hidden, hidden)
        self.decoder = _ClassicDecoder(target_vocab_size, hidden, max_length)
        encoder_parameters = [*self.embedding.parameters(), *self.encoder.parameters()]
        self.optimizers = [
            torch.optim.SGD(parameters, lr=0.01) for parameters in (encoder_parameters, self.decoder.parameters())
        ]
        self.coin = random.Random(0)

    def _encode(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.zeros(1, 1, self.hidden)
        memory = torch.zeros(self.max_length, self.hidden)
        for position, token in enumerate(tokens):
            outputs, hidden = self.encoder(self.embedding(token).view(1, 1, -1), hidden)
            memory[position] = outputs[0, 0]
        return memory, hidden

    def train_on_sentence(self, source: Tensor, target: Tensor) -> None:
        """Make a step of SGD. Both sides end with EOS, and `target` has no SOS."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        memory, hidden = self._encode(source)
        loss = torch.zeros(())
        token = torch.tensor([SOS])
        forced = self.coin.random() < 0.5
        for truth in target.split(1):
            logits, hidden = self.decoder(token, hidden, memory)
            loss = loss + F.nll_loss(logits, truth)
            token = truth if forced else logits.argmax(1).detach()
            if not forced and token.item() == EOS:
                break
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def train_on(self, pairs: PackedPairs, rows: Tensor) -> None:
        self.decoder.train()
        for row in rows.tolist():
            self.train_on_sentence(torch.tensor(pairs.source[row]), torch.tensor(pairs.target[row][1:]))

    @torch.no_grad()
    def translate(self, pairs: PackedPairs, rows: Tensor) -> list[list[int]]:
        self.decoder.eval()
        translations = []
        for row in rows.tolist():
            memory, hidden = self._encode(torch.tensor(pairs.source[row]))
            token = torch.tensor([SOS])
            tokens = []
            for _ in range(self.max_length):
                logits, hidden = self.decoder(token, hidden, memory)
                token = logits.argmax(1)
                if int(token) == EOS:
                    break
                tokens.append(int(token))
            translations.append(tokens)
        return translations


class _PresentDecoder(nn.Module):
    def __init__(self, tokens: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, hidden)
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.energy = nn.Linear(hidden, 1)
        self.recurrent = nn.GRU(2 * hidden, hidden, batch_first=True)
        self.output = nn.Linear(hidden, tokens)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Decode one token per sentence: tokens (batch, 1), state (1, batch, hidden), memory (batch, time, hidden)."""
        embedded = self.dropout(self.embedding(tokens))
        energies = self.energy(torch.tanh(self.query(hidden.transpose(0, 1)) + self.key(memory)))
        context = torch.softmax(energies.transpose(1, 2), dim=2) @ memory
        outputs, hidden = self.recurrent(torch.cat((embedded, context), 2), hidden)
        return self.output(outputs), hidden


class PresentTranslator:
    """Present form: batches of 32, padded to ten tokens that all count in the loss, with teacher forcing."""

    def __init__(self, source_vocab_size: int, target_vocab_size: int, hidden: int = 256, max_length: int = 10) -> None:
        self.max_length = max_length
        self.batch_size = 32
        self.embedding = nn.Embedding(source_vocab_size, hidden)
        self.dropout = nn.Dropout(0.1)
        self.encoder = nn.GRU(hidden, hidden, batch_first=True)
        self.decoder = _PresentDecoder(target_vocab_size, hidden)
        self.modules = nn.ModuleList((self.embedding, self.dropout, self.encoder, self.decoder))
        encoder_parameters = [*self.embedding.parameters(), *self.encoder.parameters()]
        self.optimizers = [
            torch.optim.Adam(parameters, lr=0.001) for parameters in (encoder_parameters, self.decoder.parameters())
        ]

    def _decode(self, source: Tensor, target: Tensor | None) -> Tensor:
        """Return log-probabilities of shape (batch, max_length, tokens)."""
        memory, hidden = self.encoder(self.dropout(self.embedding(source)))
        tokens = source.new_full((len(source), 1), SOS)
        outputs = []
        for position in range(self.max_length):
            logits, hidden = self.decoder(tokens, hidden, memory)
            outputs.append(logits)
            tokens = logits.argmax(2).detach() if target is None else target[:, position : position + 1]
        return F.log_softmax(torch.cat(outputs, 1), dim=2)

    def _filled(self, sentences: Tensor) -> Tensor:
        return F.pad(sentences, (0, self.max_length - sentences.shape[1]))

    def train_on(self, pairs: PackedPairs, rows: Tensor) -> None:
        self.modules.train()
        for part in rows.split(self.batch_size):
            batch = pairs.batch(part)
            source = self._filled(batch.source)
            target = self._filled(batch.target[:, 1:])
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            F.nll_loss(self._decode(source, target).flatten(0, 1), target.flatten()).backward()
            for optimizer in self.optimizers:
                optimizer.step()

    @torch.no_grad()
    def translate(self, pairs: PackedPairs, rows: Tensor) -> list[list[int]]:
        self.modules.eval()
        found: list[list[int]] = []
        for part in rows.split(256):
            for tokens in self._decode(self._filled(pairs.batch(part).source), None).argmax(2).tolist():
                found.append(tokens[: tokens.index(EOS)] if EOS in tokens else tokens)
        return found
