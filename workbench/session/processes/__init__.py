"""The processes of a session: start, list, watch, end.

`launch` starts them on this host and forks engines through `fork_server`. `launch_profile` starts them by an
ipyparallel profile, over SSH with `ssh_engines`. `folder` lists them in the session's private folder. `watchdog` ends
processes that outlive their notebook. `discovery` finds the sessions of this user. `rendezvous_address` finds the
address of the rendezvous of engines on several hosts. `oom_kills` counts OOM kills.
"""
