"""Small conversations: as records, as lanes in memory, and the loss of one step written with nothing but torch."""

from __future__ import annotations

import numpy as np
import torch

from parallel3d.data.conversation_lanes import ConversationLanes
from parallel3d.data.conversations import ChatTemplate
from parallel3d.data.documents import TokenizedDocuments
from parallel3d.data.marked_text import MarkedText
from parallel3d.data.tokenizer import ByteTokenizer
from tests.support import plain_llama

EOS = ByteTokenizer.eos_id


def records(number: int) -> list[dict[str, object]]:
    """Conversations of one and two replies, and pairs, of many lengths."""
    made: list[dict[str, object]] = []
    for index in range(number):
        asked, answer = f"{index}+{index % 7}?", "=" * (index % 5) + str(index + index % 7)
        turn = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        made.append(
            {"messages": turn * (1 + index % 2)} if index % 3 else {"prompt": asked * (index % 9), "completion": answer}
        )
    return made


class ChatTexts:
    """Marked texts in memory."""

    def __init__(self, number: int = 200):
        template = ChatTemplate()
        self.texts = [template.mark(record, f"record {index}") for index, record in enumerate(records(number))]

    def __len__(self) -> int:
        return len(self.texts)

    def read(self, index: int) -> MarkedText:
        return self.texts[index]


def chat_lanes(seed: int, num_lanes: int, number: int = 200) -> ConversationLanes:
    return ConversationLanes(TokenizedDocuments(ChatTexts(number), ByteTokenizer()), seed, num_lanes)


def plain_step(config, weights) -> tuple[float, float, int]:
    """Mean loss and gradient norm of the first step, each conversation computed for itself, and the tokens with one."""
    lanes = chat_lanes(config.run.seed, config.batch.global_batch_size)
    weights = {name: value.clone().requires_grad_() for name, value in weights.items()}
    total, count = torch.zeros((), dtype=torch.float64), 0
    for slot in range(config.batch.global_batch_size):
        row, _ = lanes.read(slot, lanes.start(slot), config.batch.sequence_length)
        ids, is_target = np.where(row < 0, ~row, row), row >= 0
        begin = 0
        for end in [*(np.flatnonzero(ids[:-1] == EOS) + 1), len(ids) - 1]:
            targets = np.where(is_target, ids, -100)[begin + 1 : end + 1]  # what torch ignores
            if end > begin:
                both = (torch.tensor(part[None].astype(np.int64)) for part in (ids[begin:end], targets))
                total = total + plain_llama.plain_loss(config.model, weights, *both)
                count += int((targets >= 0).sum())
            begin = end
    (total / count).backward()
    total = total.detach()
    norm = sum(float(weight.grad.square().sum()) for weight in weights.values()) ** 0.5
    return float(total) / count, norm, count
