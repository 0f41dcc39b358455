//! Conversions that several frameworks share.

use crate::adapters::Targets;
use crate::reader::float;
pub(crate) use crate::row::DATA;
use crate::table::{Dtype, Effect, FORCED, Fact, Float8Scaling, ROUTING, list, quoted};
use crate::tree::{Name, Node, Value};

type Converted = Result<Effect, String>;

pub(crate) const SAVING: &str = "loading and saving, not part of a step";
pub(crate) const LOGGING: &str = "logging, not part of a step";
pub(crate) const PACKED: &str =
    "sequences are predicted as full; train.document_lengths says which documents they hold";
/// Why Muon is not predicted for jobs of frameworks: each has an implementation of its own.
pub(crate) const MUON: &str = "implementations of Muon gather matrices in different ways: train.optimizer = \"muon\" plans those of fsdp.policy = \"native\" and \"fsdp2\", and AdamW is predicted here";
pub(crate) const EVALUATION: &str = "evaluation, not part of a training step";
/// Why the number of SMs of an exchange of tokens is not used.
pub(crate) const EXCHANGE_SMS: &str =
    "the exchange of tokens is predicted with the SMs of the hardware profile";
pub(crate) const LAUNCH: &str = "launching, not part of a step";
pub(crate) const VALUES: &str = "changes numbers, not time or memory";
pub(crate) const KERNELS: &str = "attention is predicted as a fused kernel";
const ATTENTION: &str = "model.attn_implementation";
pub(crate) const ADAPTER: &str = "other adapters than LoRA are not modeled";
pub(crate) const LAYER_COPIES: &str = "layers are predicted once";
pub(crate) const DROPOUT: &str = "adapters are predicted without dropout";
pub(crate) const QUANTIZED: &str =
    "quantized weights are modeled only in NF4 and in bitsandbytes' int8";
pub(crate) const NF4: &str = "4-bit weights are predicted as NF4";
pub(crate) const STORAGE: &str = "the storage type of 4-bit weights";
pub(crate) const TENSOR: &str = "tensor parallelism is not modeled for transformers";
pub(crate) const PIPELINE: &str = "pipeline parallelism is not modeled";
pub(crate) const CONTEXT: &str = "context parallelism is not modeled";
pub(crate) const ULYSSES: &str = "Ulysses sequence parallelism is not modeled";
pub(crate) const REFERENCE: &str = "a reference model, a second one in memory, is not modeled";
/// Why methods that train some layers at a time (LISA, BAdam) are refused.
pub(crate) const LAYERS_IN_TURN: &str = "layers that are trained in turn are not modeled";
/// Notes on Liger's kernels.
pub(crate) const FUSED_LOSS: &str = "the fused loss is predicted as the chunked one";
pub(crate) const LIGER_KERNELS: &str = "Liger's fused kernels are predicted as those of PyTorch";
/// Why training with a teacher is refused.
pub(crate) const DISTILLATION: &str = "distillation, with a second model, is not modeled";
pub(crate) const PREFERENCES: &str = "training on preferences or rewards is not modeled";

/// Sets a scenario key to a string.
pub(crate) fn set(key: &'static str, value: &str) -> Effect {
    Effect::Set(key, quoted(value))
}

/// Keeps the frozen model in 4 bits, by default with float32 scales, as bitsandbytes does.
pub(crate) fn four_bits(node: &Node) -> Converted {
    if_true(node, Effect::Fact(Fact::FourBits, 1))
}

/// Keeps the frozen model in 4 bits, with 8-bit scales unless another key gives 4 bits, too.
pub(crate) fn four_bits_twice(node: &Node) -> Converted {
    if_true(node, Effect::Fact(Fact::FourBitsToo, 2))
}

/// Keeps the frozen model in int8.
pub(crate) fn eight_bits(node: &Node) -> Converted {
    if_true(node, Effect::Fact(Fact::EightBits, 1))
}

/// Reads whether the scales of 4-bit weights have 8 bits.
pub(crate) fn double_quantization(node: &Node) -> Converted {
    Ok(Effect::Fact(Fact::DoubleQuantization, node.truth()?.into()))
}

/// Applies an effect if the value is true.
pub(crate) fn if_true(node: &Node, effect: Effect) -> Converted {
    Ok(if node.truth()? {
        effect
    } else {
        Effect::Aside("off")
    })
}

/// Spreads tokens evenly over the experts, in random combinations, whatever the routers choose.
pub(crate) fn forced_routing(node: &Node) -> Converted {
    if_true(node, Effect::Set(FORCED, "true".to_owned()))
}

/// Gives tokens the experts in round-robin order, whatever the routers choose.
pub(crate) fn round_robin_routing(node: &Node) -> Converted {
    let forced = Effect::Set(FORCED, "true".to_owned());
    if_true(node, Effect::All(vec![forced, set(ROUTING, "round_robin")]))
}

/// Reads options of PyTorch's allocator: `expandable_segments:True`.
pub(crate) fn allocator(node: &Node) -> Converted {
    let text = node.full().to_ascii_lowercase();
    let mut options = text.split(',');
    Ok(
        match options.find_map(|o| o.trim().strip_prefix("expandable_segments:")) {
            Some(value) => Effect::Set(
                "fsdp.expandable_segments",
                (value.trim() == "true").to_string(),
            ),
            None => Effect::Lost("the allocator is predicted with PyTorch's other defaults"),
        },
    )
}

/// Runs the matmuls of linear layers in 8 bits.
pub(crate) fn float8(node: &Node) -> Converted {
    if_true(node, Effect::Fact(Fact::Float8, 1))
}

/// Gathers weights in 8 bits.
pub(crate) fn float8_gather(node: &Node) -> Converted {
    if_true(node, Effect::Fact(Fact::Float8Gather, 1))
}

/// Computes the scales for these gathers after the optimizer step.
pub(crate) fn float8_ahead(node: &Node) -> Converted {
    if_true(node, Effect::Fact(Fact::Float8Ahead, 1))
}

/// Keeps the transposed 8-bit copies of gathered weights.
pub(crate) fn float8_transposes(node: &Node) -> Converted {
    if_true(node, Effect::Fact(Fact::Float8Transposes, 1))
}

/// Reads Transformer Engine's formats: `hybrid` means gradients in e5m2.
pub(crate) fn float8_format(node: &Node) -> Converted {
    Ok(match node.full().to_ascii_lowercase().as_str() {
        "e4m3" => set("precision.float8_grad", "e4m3"),
        "hybrid" => set("precision.float8_grad", "e5m2"),
        _ => return Err(node.expected("HYBRID or E4M3")),
    })
}

/// Reads the library that runs 8-bit matmuls.
pub(crate) fn float8_library(node: &Node) -> Converted {
    Ok(match node.full().to_ascii_lowercase().as_str() {
        "auto" | "ao" | "torchao" => Effect::Aside("predicted as torchao's default recipe"),
        "te" => Effect::Lost("scales are predicted from the current maxima"),
        "msamp" => Effect::Lost(MSAMP),
        _ => return Err(node.expected("AO, TE or MSAMP")),
    })
}

/// Reads which of the three matmuls of a layer (forward and two in backward) stay in 16 bits.
pub(crate) fn float8_overrides(node: &Node) -> Converted {
    Ok(match node.full().to_ascii_lowercase().contains("true") {
        true => Effect::Lost("all matmuls of a layer are predicted in 8 bits"),
        false => Effect::Aside("off"),
    })
}

/// What MS-AMP keeps in 8 bits in addition to matmuls.
pub(crate) const MSAMP: &str =
    "gradients and optimizer states of MS-AMP are predicted with the types of `[precision]`";

/// Reads the name of an 8-bit recipe of torchao or Transformer Engine.
pub(crate) fn float8_recipe(node: &Node) -> Converted {
    let nearly =
        |scaling: Float8Scaling, why| Effect::All(vec![scaling.effect(), Effect::Lost(why)]);
    Ok(match node.full().as_str() {
        "tensorwise" => Float8Scaling::Tensor.effect(),
        "rowwise" => Float8Scaling::Row.effect(),
        "blockwise" => Float8Scaling::Block.effect(),
        name if name.starts_with("mxfp8") => Float8Scaling::Mx.effect(),
        "rowwise_with_gw_hp" => nearly(
            Float8Scaling::Row,
            "gradients of weights are predicted in 8 bits, too",
        ),
        "delayed" => nearly(
            Float8Scaling::Tensor,
            "scales are predicted from the current maxima",
        ),
        name if name.starts_with("mx") => nearly(
            Float8Scaling::Mx,
            "of the microscaling formats, MXFP8 is predicted",
        ),
        _ => nearly(Float8Scaling::Tensor, "predicted with one scale per tensor"),
    })
}

/// Recomputes whole blocks in backward.
pub(crate) fn full_recompute(node: &Node) -> Converted {
    // Axolotl and Unsloth have names for variants that move activations to the host.
    if let Some("offload" | "offload_disk" | "unsloth") = node.text() {
        return Ok(Effect::Assume(
            "train.recompute",
            quoted("full"),
            "activations offloaded to the host are predicted as recomputed",
        ));
    }
    if_true(node, set("train.recompute", "full"))
}

/// Reduces gradients in every micro-batch, not only in the last one.
pub(crate) fn synchronized_micro_batches(node: &Node) -> Converted {
    if_true(node, set("fsdp.gradient_sync", "every"))
}

fn fixed_order() -> Effect {
    Effect::Set("precision.deterministic", "true".to_owned())
}

/// Fixes the order of sums.
pub(crate) fn deterministic(node: &Node) -> Converted {
    if_true(node, fixed_order())
}

/// Does the same, with kernels that the host waits for.
pub(crate) fn full_determinism(node: &Node) -> Converted {
    let waits = Effect::Lost(
        "the host is predicted not to wait for each kernel (CUDA_LAUNCH_BLOCKING is not modeled)",
    );
    if_true(node, Effect::All(vec![fixed_order(), waits]))
}

/// Reads whether Liger replaces the loss, too.
pub(crate) fn unfused_loss(node: &Node) -> Converted {
    Ok(if node.truth()? {
        Effect::Aside("as predicted")
    } else {
        Effect::Fact(Fact::UnfusedLoss, 1)
    })
}

/// Moves saved activations to host memory.
pub(crate) fn offloaded_activations(node: &Node) -> Converted {
    if_true(
        node,
        Effect::Set("train.activation_offload", "true".to_owned()),
    )
}

/// Reads whether activation checkpointing in the model's code is reentrant.
pub(crate) fn reentrant(node: &Node) -> Converted {
    Ok(Effect::Fact(Fact::Reentrant, node.truth()?.into()))
}

/// Computes the loss in chunks.
pub(crate) fn chunked_loss(node: &Node) -> Converted {
    if_true(node, fused_loss())
}

/// Computes the loss in Liger's fused kernel.
pub(crate) fn fused_loss() -> Effect {
    Effect::Assume("train.loss", quoted("chunked"), FUSED_LOSS)
}

/// Replaces norms, rotary embeddings, activations and the loss with Liger's fused kernels.
pub(crate) fn liger_kernels(node: &Node) -> Converted {
    let effects = vec![fused_loss(), fused_norms()];
    if_true(node, Effect::All(effects))
}

/// Reads the attention implementation, in the terms of transformers or LLaMA-Factory.
pub(crate) fn attention(node: &Node) -> Converted {
    Ok(match node.text() {
        Some("sdpa") => set(ATTENTION, "sdpa"),
        Some("eager" | "disabled") => set(ATTENTION, "eager"),
        Some("flash_attention_2" | "fa2") => set(ATTENTION, "flash_attention_2"),
        _ => Effect::Aside(KERNELS),
    })
}

/// Chooses FlashAttention 2.
pub(crate) fn flash_attention(node: &Node) -> Converted {
    if_true(node, set(ATTENTION, "flash_attention_2"))
}

/// Chooses `scaled_dot_product_attention`.
pub(crate) fn sdp_attention(node: &Node) -> Converted {
    if_true(node, set(ATTENTION, "sdpa"))
}

/// Reads the number of layers that LISA trains at a time. 0 turns it off.
pub(crate) fn layers_in_turn(node: &Node) -> Converted {
    Ok(match node.count()? {
        0 => Effect::Aside("off"),
        _ => Effect::Decisive(LAYERS_IN_TURN),
    })
}

/// Chooses eager attention.
pub(crate) fn eager_attention(node: &Node) -> Converted {
    if_true(node, set(ATTENTION, "eager"))
}

/// Replaces norms with Liger's fused kernels.
pub(crate) fn liger_norms(node: &Node) -> Converted {
    if_true(node, fused_norms())
}

fn fused_norms() -> Effect {
    Effect::Assume("model.implementation", quoted("torchtitan"), LIGER_KERNELS)
}

/// Compiles the model with graph breaks at FSDP's hooks.
pub(crate) fn compiled_regions(node: &Node) -> Converted {
    if node.is_auto() {
        return Ok(Effect::Aside(
            "compiled only if it helps, as the framework decides",
        ));
    }
    if_true(node, set("compile.mode", "regions"))
}

/// Compiles each block.
pub(crate) fn compiled_blocks(node: &Node) -> Converted {
    if_true(node, set("compile.mode", "blocks"))
}

/// Computes in bfloat16 under mixed precision.
pub(crate) fn mixed_bf16(node: &Node) -> Converted {
    mixed(node, Dtype::Bf16)
}

/// Computes in float16 under mixed precision.
pub(crate) fn mixed_f16(node: &Node) -> Converted {
    mixed(node, Dtype::F16)
}

fn mixed(node: &Node, dtype: Dtype) -> Converted {
    match node.text() {
        // In Axolotl, `auto` means that bf16 is on if the GPU supports it.
        Some("auto") if dtype == Dtype::Bf16 => Ok(Effect::Mixed(dtype)),
        Some("auto") => Ok(Effect::Aside("filled in from the training arguments")),
        Some("full") => Ok(Effect::Weights(dtype)),
        _ => if_true(node, Effect::Mixed(dtype)),
    }
}

/// Reads the dtype in which the model is loaded.
pub(crate) fn weights(node: &Node) -> Converted {
    if node.is_auto() {
        return Ok(Effect::Aside("the type of the checkpoint"));
    }
    Ok(Effect::Weights(Dtype::of(node)?))
}

/// Note for optimizers whose state moves to host memory when the device is full.
pub(crate) const PAGED: &str = "paged states are predicted on the device";

/// Sets an optimizer with 8-bit state.
pub(crate) fn in_8_bits(optimizer: &str) -> Effect {
    let moments = set("precision.moments", "8bit");
    Effect::All(vec![set("train.optimizer", optimizer), moments])
}

/// Sets an optimizer of bitsandbytes with float32 state, whatever the type of the weights
/// (`init_state` with `optim_bits` of 32).
pub(crate) fn in_32_bits(optimizer: &str) -> Effect {
    let moments = set("precision.moments", "f32");
    Effect::All(vec![set("train.optimizer", optimizer), moments])
}

/// Note for an optimizer whose states the prediction replaces by those of AdamW.
pub(crate) const UNMODELED: &str =
    "this optimizer is not modeled: AdamW is predicted, with its two moments";

/// Reads an optimizer of the Trainer.
pub(crate) fn optimizer(node: &Node) -> Converted {
    let name = node.full().to_ascii_lowercase();
    let rest = name.strip_prefix("optimizernames.").unwrap_or(&name);
    Ok(match rest {
        "adam" | "adamw" | "adamw_torch" | "adamw_torch_fused" | "adamw_hf"
        | "adamw_apex_fused" => set("train.optimizer", "adamw"),
        "adamw_bnb_32bit" => in_32_bits("adamw"),
        "paged_adamw" | "paged_adamw_32bit" => {
            Effect::All(vec![in_32_bits("adamw"), Effect::Lost(PAGED)])
        }
        "lion" | "lion_32bit" => in_32_bits("lion"),
        "paged_lion" | "paged_lion_32bit" => {
            Effect::All(vec![in_32_bits("lion"), Effect::Lost(PAGED)])
        }
        "adamw_8bit" | "adamw_bnb_8bit" | "adamw_torch_8bit" => in_8_bits("adamw"),
        "paged_adamw_8bit" => Effect::All(vec![in_8_bits("adamw"), Effect::Lost(PAGED)]),
        "lion_8bit" => in_8_bits("lion"),
        "paged_lion_8bit" => Effect::All(vec![in_8_bits("lion"), Effect::Lost(PAGED)]),
        "sgd" => set("train.optimizer", "sgd"),
        "muon" => Effect::Assume("train.optimizer", quoted("adamw"), MUON),
        _ => Effect::Assume("train.optimizer", quoted("adamw"), UNMODELED),
    })
}

/// Reads the weight decay of a trainer that excludes norms and biases from decay.
pub(crate) fn decay_of_matrices(node: &Node) -> Converted {
    let decay = node.number()?;
    let set = Effect::Set("train.weight_decay", float(decay));
    if decay == 0.0 {
        return Ok(set);
    }
    let without = Effect::Set("train.decay_norms_and_biases", "false".to_owned());
    Ok(Effect::All(vec![set, without]))
}

/// Reads a learning rate schedule.
pub(crate) fn schedule(node: &Node) -> Converted {
    let name = node.full().to_ascii_lowercase();
    let name = name.strip_prefix("schedulertype.").unwrap_or(&name);
    Ok(match name {
        "constant" | "constant_with_warmup" => set("train.lr_schedule", "constant"),
        "cosine" => set("train.lr_schedule", "cosine"),
        _ => Effect::Aside("the learning rate changes numbers, not time or memory"),
    })
}

/// Reads a number of ranks. 0, -1 and `auto` mean all remaining ranks.
pub(crate) fn ranks(node: &Node, fact: Fact) -> Converted {
    if node.is_auto() {
        return Ok(Effect::Aside("what remains after the other sizes"));
    }
    Ok(match node.integer()? {
        -1 | 0 => Effect::Aside("what remains after the other sizes"),
        _ => Effect::Fact(fact, node.count()?),
    })
}

/// Reads the number of ranks that shard.
pub(crate) fn shard_ranks(node: &Node) -> Converted {
    ranks(node, Fact::DpShard)
}

/// Reads the number of replicas.
pub(crate) fn replicas(node: &Node) -> Converted {
    ranks(node, Fact::DpReplicate)
}

/// Reads AdamW's two betas.
pub(crate) fn betas(node: &Node) -> Converted {
    let Value::List(items) = &node.value else {
        return Err(node.expected("two numbers"));
    };
    let [a, b] = items.as_slice() else {
        return Err(node.expected("two numbers"));
    };
    let pair = format!("[{}, {}]", float(a.number()?), float(b.number()?));
    Ok(Effect::Set("train.betas", pair))
}

/// Sets the maximum norm for gradient clipping.
pub(crate) fn clip(node: &Node) -> Converted {
    Ok(Effect::Set("train.clip_norm", float(node.number()?)))
}

/// Reads whether the vision tower is frozen.
pub(crate) fn frozen_vision(node: &Node) -> Converted {
    Ok(Effect::Fact(Fact::FrozenVision, node.truth()?.into()))
}

/// Reads whether the projector between the vision tower and the language model is frozen.
pub(crate) fn frozen_projector(node: &Node) -> Converted {
    Ok(Effect::Fact(Fact::FrozenProjector, node.truth()?.into()))
}

/// Reads whether the language model is frozen.
pub(crate) fn frozen_language(node: &Node) -> Converted {
    Ok(Effect::Fact(Fact::FrozenLanguage, node.truth()?.into()))
}

/// Trains adapters.
pub(crate) fn adapter(node: &Node) -> Converted {
    Ok(Effect::Fact(Fact::Adapter, node.truth()?.into()))
}

/// Reads the layers that get adapters: names, a keyword for all layers, or a regular expression.
pub(crate) fn targets(node: &Node) -> Converted {
    Targets::of(node).map(Effect::Targets)
}

/// Puts adapters on all linear layers of the blocks.
pub(crate) fn all_linear(node: &Node) -> Converted {
    if_true(node, Effect::Targets(Targets::AllLinear))
}

/// Trains modules in full next to the adapters.
pub(crate) fn saved_modules(node: &Node) -> Converted {
    let names = node
        .words()
        .ok_or_else(|| node.expected("a list of modules"))?;
    let names: Vec<String> = names
        .split([' ', ','])
        .filter(|n| !n.is_empty())
        .map(str::to_owned)
        .collect();
    Ok(match names.as_slice() {
        [] => Effect::Aside("as predicted"),
        names => Effect::Set("lora.modules_to_save", list(names)),
    })
}

/// Reads the layers that get no adapter: names, or one regular expression.
pub(crate) fn excluded_modules(node: &Node) -> Converted {
    const KEY: &str = "lora.exclude_modules";
    if let Some(expression) = node.text() {
        return Ok(Effect::Set(KEY, quoted(expression)));
    }
    Ok(match names(node)?.as_slice() {
        [] => Effect::Aside("as predicted"),
        names => Effect::Set(KEY, list(names)),
    })
}

/// Reads the numbers of the blocks that get adapters.
pub(crate) fn transformed_layers(node: &Node) -> Converted {
    let numbers: Vec<String> = match &node.value {
        Value::List(items) => {
            let items = items.iter().map(|n| Ok(n.count()?.to_string()));
            items.collect::<Result<_, String>>()?
        }
        _ => vec![node.count()?.to_string()],
    };
    Ok(match numbers.as_slice() {
        [] => Effect::Aside("adapters in all blocks"),
        some => Effect::Set("lora.layers_to_transform", format!("[{}]", some.join(", "))),
    })
}

/// Reads the names of the lists of blocks that `transformed_layers` counts.
pub(crate) fn layers_pattern(node: &Node) -> Converted {
    Ok(match names(node)?.as_slice() {
        [] => Effect::Aside("any list of blocks"),
        names => Effect::Set("lora.layers_pattern", list(names)),
    })
}

/// Returns a name, or the names of a list.
fn names(node: &Node) -> Result<Vec<String>, String> {
    let names = match &node.value {
        Value::List(items) => items.iter().map(Node::text).collect(),
        _ => node.text().map(|name| vec![name]),
    };
    let names: Vec<&str> = names.ok_or_else(|| node.expected("a list of names"))?;
    Ok(names.into_iter().map(str::to_owned).collect())
}

/// Reads the ranks of layers that differ from the rank of all.
pub(crate) fn adapter_ranks(node: &Node) -> Converted {
    patterns(node, "lora.rank_pattern", |n| Ok(n.count()?.to_string()))
}

/// Reads the numerators of the scalings of layers that differ from that of all.
pub(crate) fn adapter_alphas(node: &Node) -> Converted {
    patterns(node, "lora.alpha_pattern", |n| Ok(float(n.number()?)))
}

/// Reads a table from patterns of layers to numbers.
fn patterns(
    node: &Node,
    key: &'static str,
    number: fn(&Node) -> Result<String, String>,
) -> Converted {
    if !matches!(node.value, Value::Map(_)) {
        return Err(node.expected("a table from patterns of layers to numbers"));
    }
    let entry = |(name, of): &(Name, Node)| Ok(format!("{} = {}", quoted(&name.text), number(of)?));
    let entries: Vec<String> = node
        .entries()
        .iter()
        .map(entry)
        .collect::<Result<_, String>>()?;
    Ok(match entries.as_slice() {
        [] => Effect::Aside("as predicted"),
        some => Effect::Set(key, format!("{{ {} }}", some.join(", "))),
    })
}

/// Scales adapters by the square root of their rank (rsLoRA).
pub(crate) fn rank_stabilized(node: &Node) -> Converted {
    if_true(node, Effect::Set("lora.use_rslora", "true".to_owned()))
}

/// Learns the magnitude of each row of the adapted weights (DoRA).
pub(crate) fn decomposed(node: &Node) -> Converted {
    if_true(node, Effect::Set("lora.use_dora", "true".to_owned()))
}

/// Reads the number of warm-up steps; a fraction is a share of all steps.
pub(crate) fn warmup(node: &Node) -> Converted {
    let number = node.number()?;
    Ok(if number.fract() == 0.0 {
        Effect::Set("train.warmup_steps", node.count()?.to_string())
    } else {
        Effect::Aside("the learning rate changes numbers, not time or memory")
    })
}
