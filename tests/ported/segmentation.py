"""Labels for every pixel: rare classes weigh more, borders are ignored, a second head helps."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(2, 5, 3, padding=1)
        self.head, self.helper = nn.Conv2d(5, 3, 1), nn.Conv2d(5, 3, 1)

    def forward(self, x):
        hidden = torch.relu(self.body(x))
        return self.head(hidden), self.helper(hidden)


def train(strategy):
    torch.manual_seed(0)
    model = TwoHeads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    labels = torch.randint(0, 3, (26, 4, 4))
    labels[torch.rand(26, 4, 4) < 0.3] = 255
    loader = DataLoader(TensorDataset(torch.randn(26, 2, 4, 4), labels), batch_size=6)
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]), ignore_index=255)
    if strategy is not None:
        model, optimizer, loader = strategy.prepare(model, optimizer, loader)
    for _ in range(2):
        for x, y in loader:
            output, helped = model(x)
            loss = criterion(output, y) + 0.4 * criterion(helped, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.state_dict()
