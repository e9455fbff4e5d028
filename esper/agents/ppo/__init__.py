"""The learning controller: recurrent PPO."""
