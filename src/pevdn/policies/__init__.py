"""What comes out of training: load a policy, act, evaluate, export, publish."""
