"""The processes of a session: start, list, watch, end.

`launch` starts them on this host, engines through `fork_server`, and `launch_profile` by an ipyparallel profile.
`folder` lists them in the session's private folder. `watchdog` ends what outlives its notebook, `discovery` finds the
sessions of this user.
`rendezvous_address` finds the address at which engines of several hosts meet, `oom_kills` counts OOM kills.
"""
