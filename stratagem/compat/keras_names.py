"""Lists every private name of Keras that the package uses, and why.

As in `torch_names`, modules of `keras.src` are imported only here. Private attributes are read
where they are needed, and listed here.
"""

from __future__ import annotations

import importlib
from typing import Any

import keras
from keras.src.models.functional import Functional as Functional
from keras.src.models.model import inject_functional_model_class as inject_functional_model_class
from keras.src.utils import tracking
from keras.src.utils.backend_utils import DynamicBackend as DynamicBackend

#: private name (tests/compat has an object of each kind), and why it is needed
PRIVATE = {
    "keras.src.models.functional.Functional": "the class of functional models, also subclassed",
    "keras.src.models.model.inject_functional_model_class": "a subclass that is made functional",
    "keras.src.backend.torch.nn._transpose_spatial_inputs": "copies images to channels first",
    "keras.src.trainers.data_adapters.array_data_adapter.ArrayDataAdapter": "slices arrays",
    "keras.src.utils.tracking.Tracker": "keys variables by identity, which another process lacks",
    "keras.src.utils.backend_utils.DynamicBackend": "an object that pickles by its argument",
    "DynamicBackend._backend": "an object that pickles by its argument",
    "Layer._flatten_layers": "every layer of a model, with those inside of layers",
    "Layer._non_trainable_variables": "what a layer holds itself, without the layers inside",
    "Layer._losses": "losses that a layer has added",
    "Layer._clear_losses": "forgets them, also those of layers inside",
    "Layer._track_variables": "gives variables of a late build() to torch",
    "Model._loss_tracker": "the metric that is the loss",
    "Model._compile_loss": "the loss of compile(), without regularisers",
    "Functional._nodes_by_depth": "the calls of a functional model, in the order in which they run",
    "Functional._outputs_struct": "how a functional model returns its outputs",
    "Functional._standardize_inputs": "a batch as a functional model takes it",
    "Model._functional": "the graph of a Sequential model",
    "Model._compile_metrics": "the metrics of compile(), before and after the first batch",
    "CompileMetrics._user_metrics": "the metrics of compile() as the user gave them",
    "CompileMetrics._user_weighted_metrics": "the metrics of compile() as the user gave them",
    "Evaluated._eval_epoch_iterator": "what fit keeps between its evaluations",
    "Masked._keras_mask": "which elements of an output count in a loss",
    "Model._symbolic_build": "is given the data's iterator by fit, before callbacks begin",
    "Iterator._enumerate_iterator": "an epoch's batches, of which a backup leaves out those seen",
    "Backup._save_model": "what a backup saves",
    "Backup._load_model": "what a backup restores, weights and epoch",
    "Backup._weights_path": "the file that it restores",
    "Backup._training_metadata_path": "the file that it restores",
    "Backup._current_epoch": "what a backup counts with, so that it goes on counting",
    "Backup._last_batch_seen": "what a backup counts with, so that it goes on counting",
    "Backup._batches_seen_since_last_saving": "what a backup counts with",
    "Optimizer._iterations": "the number of steps, settable",
    "Optimizer._learning_rate": "the variable, or the schedule, of the learning rate",
    "Optimizer._variables": "the list of all variables, which is no state by variable",
    "Optimizer._trainable_variables": "the variables that the optimizer was built for, in order",
    "Optimizer._trainable_variables_indices": "their places by identity, made anew elsewhere",
    "Optimizer._get_variable_index": "the place of a variable's state",
    "Optimizer._momentums": "Adam's first moments",
    "Optimizer._velocities": "Adam's second moments",
    "Optimizer._parallel_update_step": "the step that the fused Adam replaces",
    "Optimizer._apply_weight_decay": "decays on a server the variables that the user's would",
    "Optimizer._use_weight_decay": "which variables are decayed",
    "Optimizer._get_current_learning_rate": "another rate for one step on a server",
    "Optimizer._update_model_variables_moving_average": "averages where no gradient came",
    "Optimizer._overwrite_model_variables_with_average_value": "averages where no gradient came",
}

#: as PRIVATE, for names that only some versions have: they are asked for
SOMETIMES = {
    "Model._initialize_ddp": "Keras' own data parallelism, since 3.16",
    "ArrayDataAdapter._epoch": "the seed of the order of rows, since 3.16",
}

Tracker: Any = tracking.Tracker
#: Keras' own list, dict and set types, which track the variables added to them
COLLECTIONS = tuple(kind for name, kind in vars(tracking).items() if name.startswith("Tracked"))
SAVEABLE: Any = next(c for c in keras.Model.__mro__ if c.__name__ == "KerasSaveable")
OPTIMIZER: Any = next(c for c in keras.Optimizer.__mro__ if c.__name__ == "BaseOptimizer")

ADAPTERS = "keras.src.trainers.data_adapters.array_data_adapter"
TO_CHANNELS_FIRST = "_transpose_spatial_inputs"


def torch_operators() -> Any:
    """Return Keras' module of torch operators, which only the torch backend may import."""
    return importlib.import_module("keras.src.backend.torch.nn")


def array_adapter() -> Any:
    """Return the class that slices arrays into batches."""
    return importlib.import_module(ADAPTERS).ArrayDataAdapter


#: attributes that do not affect a training step, or that a step itself writes; names that Keras no
#: longer has do no harm
BOOKKEEPING = frozenset(
    {
        "_tracker",
        "_auto_config",
        "_lock",
        "_path",
        "_parent_path",
        "_called",
        "built",
        "history",
        "stop_training",
        "_losses",
        "_loss_ids",
        "_losses_override",
        "_inbound_nodes",
        "_outbound_nodes",
        "_call_signature",
        "_build_shapes_dict",
        "train_function",
        "test_function",
        "predict_function",
        "_compiled_trainable_state",
        "_compile_config",
        "_eval_epoch_iterator",
        "_initial_epoch",
        "_inputs",
        "_outputs",
        "_inputs_struct",
        "_outputs_struct",
        "_nodes",
        "_nodes_by_depth",
        "_operations",
        "_operations_by_depth",
        "_functional",
        "_seed_generators",
        "optimizer",
        "call_signature_parameters",
        "_call_context_args",
        "_call_has_context_arg",
    }
)
