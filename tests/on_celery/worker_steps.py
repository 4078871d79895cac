"""The steps of a Celery job that are Celery's alone, for a worker whose steps are to raise."""

#: What only a fleet with listeners has; in the main process; in the process that runs the task.
OWN = [
    "engine.events:started",
    "engine.events:Dispatcher.emit",
    "celery.request:carried",
    "celery.receiving:_check",
    "celery.task:_is_outside",
    "celery.task:_body",
    "celery.task:_execution_of",
    "celery.task:_hide_state",
    "celery.delivery:Delivery.__init__",
    "celery.execution:attach",
    "celery.execution:task_policy",
    "celery.execution:TaskRun._asked",
    "celery.delivery:Delivery.bare_job",
    "celery.delivery:Delivery.job",
    "celery.delivery:decoded",
    "celery.wire:queue_of",
    "celery.wire:expiry",
]
#: What is done for a crash, and after a job has ended.
AFTERWARDS = ["celery.execution:TaskRun.resume", "celery.request:OJSRequest._ojs_forget"]
