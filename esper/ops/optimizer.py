"""A base of optimizers that leaves torch.compile alone."""

from inspect import unwrap

from torch.optim.optimizer import Optimizer


class LightOptimizer(Optimizer):
    """``torch.optim.Optimizer`` without the decorator that hides four of its methods from ``torch.compile``.

    At its first call the decorator imports the compiler: a second and 80 MB of every process. Nothing compiles a call
    of these methods.
    """

    add_param_group = unwrap(Optimizer.add_param_group)
    zero_grad = unwrap(Optimizer.zero_grad)
    state_dict = unwrap(Optimizer.state_dict)
    load_state_dict = unwrap(Optimizer.load_state_dict)
