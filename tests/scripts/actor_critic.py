"""An agent whose actor and critic are called through its methods, one optimizer for both."""

import torch
from torch import nn
from torch.distributions import Categorical


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))

    def get_action_and_value(self, x, action=None):
        dist = Categorical(logits=self.actor(x))
        action = dist.sample() if action is None else action
        return action, dist.log_prob(action), self.critic(x)


torch.manual_seed(0)
agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=0.01, eps=1e-5)
# (the one line)
losses = []
for _ in range(40):
    state = torch.randn(64, 4)
    with torch.no_grad():
        action, _, _ = agent.get_action_and_value(state)
    reward = (action == state[:, :3].argmax(1)).float()
    _, log_prob, value = agent.get_action_and_value(state, action)
    advantage = reward - value.detach().squeeze(1)
    loss = -(log_prob * advantage).mean() + 0.5 * (value.squeeze(1) - reward).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(1 - reward.mean().item())
print("loss", sum(losses[:10]), sum(losses[-10:]))
