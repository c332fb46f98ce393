"""A student learns from labels and from a frozen teacher's softened outputs."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def train(strategy):
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    student = nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(47, 6), torch.randint(0, 4, (47,)))
    loader = DataLoader(data, batch_size=9)
    temperature, alpha = 3.0, 0.7
    if strategy is not None:
        student, optimizer, loader = strategy.prepare(student, optimizer, loader)
    for _ in range(2):
        for x, y in loader:
            with torch.no_grad():
                wanted = F.softmax(teacher(x) / temperature, dim=1)
            logits = student(x)
            soft = F.kl_div(
                F.log_softmax(logits / temperature, dim=1), wanted, reduction="batchmean"
            )
            loss = alpha * temperature**2 * soft + (1 - alpha) * F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return student.state_dict()
