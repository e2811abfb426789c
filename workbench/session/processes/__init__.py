"""The processes of a session: started, listed, watched, ended.

`launch` starts them on this host, `launch_profile` by an ipyparallel profile; `folder` lists them in the session's
private folder, `guard` ends what outlives its notebook, `kept` finds what should; `meeting_point` is where engines
of several hosts meet, `oom_kills` tells what the kernel ended.
"""
