"""Models as others read and write them: folders in the format of Hugging Face's transformers.

Read layout.py (where each of their tensors lies in our stages), config.py (their config.json) and
checkpoint.py (such a folder, read tensor by tensor), taking_in.py (a run that begins from one),
then export.py (a folder out of a run's weights; card.py writes its page, push.py uploads it),
adapters.py (where only adapters were trained, these, or weights with them in), from_saves.py (the
weights, out of a run's saves), living_run.py (which nodes of a run are asked), from_swarm.py (the
weights, out of those) and whole_model.py (such a folder, computed with in one process), with which
generate.py makes text, dialogue.py answers questions and evaluate.py tells how good it is;
through_swarm.py computes with the stages where they are trained, samples.py has them do so while
they are. options.py has what the commands say of an export and of an evaluation.
"""
