"""Rollout servers: programs that serve rollouts by the Osmosis protocol, unmodified.

The program runs in the sandbox of its run. Beside it, in the same sandbox, runs our side of the
protocol, which starts it, sends it one rollout per sample and passes the results on.
"""
