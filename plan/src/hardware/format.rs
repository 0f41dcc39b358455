//! The table of sections and keys.

use crate::config::AttentionBackend;
use crate::ir::ScaleMode;
use IfAbsent::{Is, Required, Unknown};
use Kind::{ByDtype, Dtype, Flag, Integer, Number, Rows, Text, Word};
use Range::{AtLeastOne, NotNegative, Positive, Rate, Scale, Share};

/// A section of a profile, or a table in an array.
#[derive(Clone, Copy, Debug)]
pub struct Section {
    /// Path without brackets: `host.work`. Empty for the top-level keys of the profile.
    pub path: &'static str,
    /// Whether there may be any number of tables: `[[gemm]]`.
    pub is_array: bool,
    /// Whether a profile must contain it. Arrays may be empty.
    pub is_required: bool,
    /// One line.
    pub doc: &'static str,
    /// Its keys, in the order in which they are written.
    pub fields: &'static [Field],
}

/// A key of a profile.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Name.
    pub key: &'static str,
    /// What it holds.
    pub kind: Kind,
    /// Unit; empty for values without one.
    pub unit: &'static str,
    /// Its value in a profile that does not set it.
    pub default: IfAbsent,
    /// One line.
    pub doc: &'static str,
}

/// What a key holds.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// A string that is not blank.
    Text,
    /// `true` or `false`.
    Flag,
    /// An integer, both ends included.
    Integer(u64, u64),
    /// A number.
    Number(Range),
    /// An element type.
    Dtype,
    /// One of these words.
    Word(&'static [&'static str]),
    /// A number for each element type.
    ByDtype(Range),
    /// A list of rows.
    Rows {
        /// The columns before the last one. They are positive integers.
        sizes: &'static [&'static str],
        /// The last column.
        last: (&'static str, Range),
        /// Whether rows ascend by their first column.
        ascending: bool,
    },
}

/// The values that a number may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Range {
    /// Above 0.
    Positive,
    /// 0 or above.
    NotNegative,
    /// Above 0 and up to 1.
    Rate,
    /// From 0 to 1.
    Share,
    /// 1 or above.
    AtLeastOne,
    /// From 0.01 to 1000.
    Scale,
}

/// The value of a key that is not set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IfAbsent {
    /// The key must be set.
    Required,
    /// Its value is unknown, or it does not apply.
    Unknown,
    /// This TOML literal.
    Is(&'static str),
}

impl Range {
    /// Returns whether a number is in the range. NaN and infinities never are.
    #[must_use]
    pub fn contains(self, x: f64) -> bool {
        x.is_finite()
            && match self {
                Positive => x > 0.0,
                NotNegative => x >= 0.0,
                Rate => x > 0.0 && x <= 1.0,
                Share => (0.0..=1.0).contains(&x),
                AtLeastOne => x >= 1.0,
                Scale => (0.01..=1000.0).contains(&x),
            }
    }

    /// Returns what a number must be, as text for an error.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Positive => "a positive number",
            NotNegative => "0 or a positive number",
            Rate => "in (0, 1]",
            Share => "between 0 and 1",
            AtLeastOne => "a number of at least 1",
            Scale => "between 0.01 and 1000",
        }
    }
}

impl Section {
    /// Returns the section for a path.
    #[must_use]
    pub fn of(path: &str) -> Option<&'static Self> {
        SECTIONS.iter().find(|section| section.path == path)
    }

    /// Returns a key.
    #[must_use]
    pub fn field(&self, key: &str) -> Option<&'static Field> {
        self.fields.iter().find(|field| field.key == key)
    }

    /// Returns the name in brackets, as in a file.
    #[must_use]
    pub fn heading(&self) -> String {
        match (self.path, self.is_array) {
            ("", _) => "the profile".to_owned(),
            (path, true) => format!("[[{path}]]"),
            (path, false) => format!("[{path}]"),
        }
    }
}

macro_rules! section {
    ($required:ident $path:literal $doc:literal { $($key:literal $kind:expr, $unit:literal, $default:expr, $value:literal;)* }) => {
        Section {
            path: $path,
            is_array: section!(@array $required),
            is_required: section!(@required $required),
            doc: $doc,
            fields: &[$(Field { key: $key, kind: $kind, unit: $unit, default: $default, doc: $value }),*],
        }
    };
    (@array array) => { true };
    (@array $other:ident) => { false };
    (@required required) => { true };
    (@required $other:ident) => { false };
}

const MAX: u64 = u32::MAX as u64;
const MAX_MIB: u64 = 1 << 40;
const US: (&str, Range) = ("us", Positive);
const KINDS: &[&str] = &["all_gather", "reduce_scatter", "all_reduce", "all_to_all"];
const GEMM_ROWS: Kind = Rows {
    sizes: &["m", "n", "k"],
    last: US,
    ascending: false,
};
const GROUPED_ROWS: Kind = Rows {
    sizes: &["experts", "rows", "n", "k"],
    last: US,
    ascending: false,
};
const ATTENTION_ROWS: Kind = Rows {
    sizes: &["batch", "heads", "kv_heads", "seq", "head_dim"],
    last: US,
    ascending: false,
};
const BYTES_ROWS: Kind = Rows {
    sizes: &["bytes"],
    last: US,
    ascending: true,
};
const TILES: Kind = Rows {
    sizes: &["rows", "columns"],
    last: ("rate", Rate),
    ascending: false,
};

/// Classes of memory-bound kernels: the keys of `[efficiency.memory]` and the `class` of
/// `[[memory]]`.
pub const MEMORY_CLASSES: [&str; 15] = {
    let mut names = [""; 15];
    let mut i = 0;
    while i < names.len() {
        names[i] = MEMORY_FIELDS[i].key;
        i += 1;
    }
    names
};

const fn class(key: &'static str, doc: &'static str) -> Field {
    Field {
        key,
        kind: Number(Rate),
        unit: "",
        default: Required,
        doc,
    }
}

const MEMORY_FIELDS: &[Field; 15] = &[
    class("pointwise", "elementwise"),
    class("strided", "elementwise, of strided operands"),
    class("norm", "LayerNorm and RMSNorm, forward"),
    class("norm_backward", "the same, backward"),
    class("column_reduce", "sums over rows"),
    class("softmax", "softmax and cross entropy, forward"),
    class("softmax_backward", "the same, backward"),
    class("embedding", "embedding lookup"),
    class("embedding_grad", "gradient of the embedding"),
    class("copy", "copy of one tensor"),
    class("multi_copy", "copies of many tensors"),
    class("fill", "fill with one value"),
    class("optimizer", "optimizer update"),
    class("full_reduce", "sum of all elements"),
    class("fused", "fused elementwise code"),
];

/// All sections, in the order in which they are written.
pub const SECTIONS: &[Section] = &[
    section!(required "" "The profile as a whole." {
        "name" Text, "", Required, "name; for shipped profiles the stem of the file";
        "about" Text, "", Required, "description of the machine, in one line";
        "extends" Text, "", Unknown, "another profile that this file changes: its name, or its path relative to this file";
    }),
    section!(optional "measured" "Where the numbers were measured. Predictions with a profile without it say `estimated`." {
        "on" Text, "", Required, "the machine and its software";
        "gpus" Integer(1, MAX), "", Required, "largest number of GPUs of one node whose collectives were measured together";
    }),
    section!(required "device" "One accelerator." {
        "source" Text, "", Required, "where the numbers come from";
        "sms" Integer(1, MAX), "", Required, "streaming multiprocessors";
        "shared_cores" Integer(1, MAX), "", Unknown, "the ranks of a node share this many cores (CPU)";
        "memory_mib" Integer(0, MAX_MIB), "MiB", Required, "memory that a process can use (less than what `nvidia-smi` shows)";
        "memory_gbps" Number(Positive), "GB/s", Required, "memory bandwidth by data sheet";
        "l2_mib" Integer(0, MAX_MIB), "MiB", Required, "second-level cache";
        "tflops" ByDtype(Positive), "TFLOP/s", Required, "dense peak by element type, from the data sheet; `f32` and `bf16` at least";
        "loaded_rate" Number(Rate), "", Is("1.0"), "rate of arithmetic while several GPUs train, relative to one alone, if tables were measured on an idle GPU; not together with `[power]`";
        "kernel_gap_us" Number(NotNegative), "us", Required, "from the end of a kernel to the start of the next one on its stream";
        "graph_gap_us" Number(NotNegative), "us", Required, "the same inside a CUDA graph";
        "launch_latency_us" Number(NotNegative), "us", Required, "from a launch to the start on an idle device";
        "event_latency_us" Number(NotNegative), "us", Is("0.0"), "additional delay after an event of another stream";
        "min_kernel_us" Number(Positive), "us", Required, "shortest kernel";
        "h2d_gbps" Number(Positive), "GB/s", Required, "copies from pinned host memory";
        "d2h_gbps" Number(Positive), "GB/s", Required, "copies to pinned host memory";
        "copy_latency_us" Number(NotNegative), "us", Required, "fixed part of such a copy";
    }),
    section!(required "footprint" "Device memory outside the allocator." {
        "source" Text, "", Required, "where the numbers come from";
        "context_mib" Integer(0, MAX_MIB), "MiB", Required, "per process: context, libraries, code of kernels";
        "joined_mib" Integer(0, MAX_MIB), "MiB", Is("0"), "additional, as soon as a process has a communicator";
        "communicator_mib" Integer(0, MAX_MIB), "MiB", Required, "per communicator";
        "copy_engine_communicator_mib" Integer(0, MAX_MIB), "MiB", Unknown, "per communicator whose collectives run on copy engines; without it `communicator_mib`";
        "collective_kernels_mib" Integer(0, MAX_MIB), "MiB", Is("0"), "once, if any collective runs on SMs";
        "used_communicators" Flag, "", Is("false"), "communicators that no collective uses do not exist (`exec`; frameworks make them all)";
        "kernel_workspaces" Flag, "", Is("false"), "kernel workspaces are outside the allocator too (`exec` on GPUs)";
    }),
    section!(required "host" "Time of the host thread to issue work, per call." {
        "source" Text, "", Required, "where the numbers come from";
        "launch_us" Number(NotNegative), "us", Required, "kernel launch, the driver call alone";
        "collective_us" Number(NotNegative), "us", Required, "launch of a collective";
        "copy_us" Number(NotNegative), "us", Required, "copy on a copy engine";
        "list_copy_us" Number(NotNegative), "us", Unknown, "launch of a copy between a buffer and a list of tensors (class `multi_copy`), a custom operator in FSDP2's Python; without it `launch_us`";
        "event_us" Number(NotNegative), "us", Required, "event record, or wait of a stream";
        "host_wait_us" Number(NotNegative), "us", Required, "waking up from a wait for an event";
        "alloc_us" Number(NotNegative), "us", Required, "allocation from the allocator's cache, or a free";
        "device_alloc_us" Number(NotNegative), "us", Required, "allocation from the device";
        "cpu_gbps" Number(Positive), "GB/s", Unknown, "optimizer on the CPU (`fsdp.offload` under policy fsdp2): bytes that it reads and writes per second, of one rank; without it `device.h2d_gbps`";
        "graph_launch_us" Number(NotNegative), "us", Required, "launch of a CUDA graph";
        "queue_depth" Integer(1, MAX), "", Required, "launches that a stream can hold";
        "steps_in_flight" Integer(1, 2), "", Is("2"), "steps that may be in flight; with 1, the host starts a step when the device has finished the previous one";
    }),
    section!(required "host.work" "Host work of the framework. For `exec`, all keys but `step_us` are 0." {
        "dispatch_us" Number(NotNegative), "us", Required, "per op of eager code in forward, launch excluded";
        "autograd_dispatch_us" Number(NotNegative), "us", Required, "per op run by the autograd engine, launch excluded";
        "guard_us" Number(NotNegative), "us", Required, "guards and entry of a compiled region";
        "compiled_kernel_us" Number(NotNegative), "us", Is("0.0"), "Python of compiled code per kernel, launch excluded";
        "graph_break_us" Number(NotNegative), "us", Required, "per graph break";
        "hook_us" Number(NotNegative), "us", Required, "per sharding hook";
        "hook_param_us" Number(NotNegative), "us", Required, "per parameter in a hook";
        "optimizer_step_us" Number(NotNegative), "us", Required, "per optimizer call";
        "step_us" Number(NotNegative), "us", Required, "per step";
        "module_us" Number(NotNegative), "us", Is("0.0"), "Python per module of a forward pass, operators excluded; only in `model.implementation = \"transformers\"`";
        "optimizer_param_us" Number(NotNegative), "us", Is("0.0"), "per parameter in an optimizer call, and in clipping; only in `model.implementation = \"transformers\"`";
        "subclass_us" Number(NotNegative), "us", Is("0.0"), "Python and further launches of torchao's tensor subclass, per weight and gather; only with `precision.float8_all_gather` and policy fsdp2";
        "copy_table_us" Number(NotNegative), "us", Is("0.0"), "per KiB of the tables of addresses that `_chunk_cat` and `split_with_sizes_copy` fill (8 bytes for every 2 KiB of a rank's gradients); only with policy fsdp2";
    }),
    section!(required "network" "Links between the devices." {
        "source" Text, "", Required, "where the numbers come from";
        "nvlink_gbps" Number(Positive), "GB/s", Required, "per GPU and direction, by data sheet (without NVLink: PCIe; on a CPU: memory)";
        "nvlink_efficiency" Number(Rate), "", Required, "share of it that large all-gathers reach";
        "nvlink_ranks" Integer(2, MAX), "", Is("8"), "number of GPUs with which this share was reached; with fewer GPUs it is smaller, because each GPU also copies its own part";
        "copy_engine_gbps" Number(Positive), "GB/s", Unknown, "bus bandwidth of large collectives on copy engines within a node, after the copy of a rank's own part; without it that of kernels";
        "nvlink_domain" Integer(1, MAX), "", Unknown, "GPUs that NVLink connects; a larger `mesh.gpus_per_node` is a warning";
        "nics_per_node" Integer(1, MAX), "", Required, "network cards of a node";
        "nic_gbps" Number(Positive), "GB/s", Required, "per card and direction";
        "nic_efficiency" Number(Rate), "", Required, "share of it that large collectives reach";
        "nic_latency_us" Number(NotNegative), "us", Required, "additional time per network hop";
        "misaligned_factor" Number(AtLeastOne), "", Required, "slowdown of large all-gathers at NVLink's rate if the payload of a rank is not a multiple of 16 bytes";
        "misaligned_reduction_factor" Number(AtLeastOne), "", Unknown, "the same for reduce-scatters; without it `misaligned_factor`";
        "straggler_loss" Number(NotNegative), "", Is("0.0"), "how much longer kernels take per doubling of the number of nodes, because collectives wait for the slowest GPU";
        "sms_per_collective" Integer(0, MAX), "", Required, "SMs that a running collective holds; fewer than `device.sms`";
    }),
    section!(required "contention" "Rates that overlapping work loses, relative to running alone." {
        "source" Text, "", Required, "where the numbers come from";
        "collective_loss_compute" Number(Share), "", Required, "loss of a collective that overlaps any kernel";
        "collective_loss_bandwidth" Number(Share), "", Required, "loss in proportion to the bandwidth that kernels use";
        "collective_bandwidth" Number(Share), "", Required, "bandwidth that a collective at full rate takes from kernels";
        "start_wait" Number(Share), "", Required, "share of a device-filling kernel after which a waiting collective gets its SMs";
        "start_wait_priority" Number(Share), "", Required, "the same on a high-priority stream";
        "start_wait_min_us" Number(NotNegative), "us", Required, "kernels shorter than this do not delay a collective";
        "h2d_loss" Number(Share), "", Is("0.0"), "loss of a copy from host memory that overlaps one to it";
        "d2h_loss" Number(Share), "", Is("0.0"), "loss of a copy to host memory that overlaps one from it";
        "shared_loss" Number(Share), "", Is("0.0"), "loss of work on one of `device.shared_cores` when all cores are busy";
        "turn_loss" Number(Share), "", Unknown, "the same when more ranks than cores take turns; without it `shared_loss`";
        "shared_wait_us" Number(NotNegative), "us", Is("0.0"), "from the first to the last rank's arrival at a collective, where ranks share cores";
    }),
    section!(optional "power" "A GPU at its power limit: `sim` solves for the clock." {
        "source" Text, "", Required, "where the numbers come from";
        "arithmetic_share" Number(Share), "", Required, "share of a step that matmuls, convolutions and attention may take at full clock";
        "arithmetic_slope" Number(Share), "", Required, "how much longer they take above it, per unit of share";
        "float8_slope" Number(Share), "", Unknown, "the same for 8-bit matmuls; without it `arithmetic_slope`";
    }),
    section!(optional "scale" "Correction factors on the time of components, as those of `sim --scale`." {
        "source" Text, "", Required, "where the numbers come from";
        "host" Number(Scale), "", Is("1.0"), "issuing work";
        "arithmetic" Number(Scale), "", Is("1.0"), "matmuls, convolutions, attention";
        "memory" Number(Scale), "", Is("1.0"), "memory-bound kernels, copies within the device";
        "collectives" Number(Scale), "", Is("1.0"), "collectives";
        "host_copies" Number(Scale), "", Is("1.0"), "copies from and to host memory";
    }),
    section!(required "efficiency" "Shares of the data sheet's rates, for shapes without a table row." {
        "source" Text, "", Required, "where the numbers come from";
        "gemm" ByDtype(Rate), "", Required, "matmuls, by element type; `f32` and `bf16` at least";
        "gemm_tiles" TILES, "", Is("[]"), "tile sizes and their rate relative to the best one; without it those of Hopper's libraries";
        "conv" Number(Rate), "", Required, "convolutions, relative to the equivalent matmul";
        "attention" Number(Rate), "", Required, "attention, forward";
        "attention_backward" Number(Rate), "", Required, "attention, backward";
        "attention_backend" Word(AttentionBackend::WORDS), "", Unknown, "library of `attention` and of `[[attention]]` tables without `backend`: the one that PyTorch picks";
        "float8_full_accumulation" Number(AtLeastOne), "", Unknown, "time of 8-bit matmuls that accumulate in float32 (`use_fast_accum = False`), relative to those that accumulate with the precision of tensor cores, if no `[[gemm]]` table has them. Without it, both take the same time";
        "attention_backward_fixed_order" Number(Positive), "", Unknown, "time with a fixed order of sums, relative to the tables. Without it, deterministic steps are priced like others, and the prediction says so";
    }),
    section!(optional "efficiency.gemm_misaligned" "Slowdown of a 16-bit matmul if the rows of an operand do not start at multiples of 16 bytes." {
        "even" Number(AtLeastOne), "", Required, "rows of an even number of elements that is not a multiple of 8";
        "odd" Number(AtLeastOne), "", Required, "rows of an odd number of elements";
        "odd_result" Number(AtLeastOne), "", Unknown, "only rows of the result have an odd number of elements, as for logits of an odd vocabulary; without it `odd`";
        "batched" Number(AtLeastOne), "", Unknown, "batches of matrices of which an operand has rows that begin at odd elements; without it `odd`";
    }),
    Section {
        path: "efficiency.memory",
        is_array: false,
        is_required: true,
        doc: "Memory-bound kernels by class: share of `memory_gbps`.",
        fields: MEMORY_FIELDS,
    },
    section!(array "gemm" "Measured matmuls." {
        "source" Text, "", Required, "where the rows come from";
        "dtype" Dtype, "", Required, "element type";
        "scaling" Word(ScaleMode::WORDS), "", Unknown, "recipe of 8-bit matmuls (`precision.float8_recipe`); without it `tensorwise`. Recipes without a table are priced by those of `tensorwise`";
        "fast_accum" Flag, "", Unknown, "whether 8-bit matmuls accumulate with the precision of tensor cores (`use_fast_accum`) or in float32; default: `true`";
        "rows" GEMM_ROWS, "", Required, "measured shapes";
    }),
    section!(array "grouped_gemm" "Measured grouped matmuls: one per expert." {
        "source" Text, "", Required, "where the rows come from";
        "dtype" Dtype, "", Required, "element type";
        "fast_accum" Flag, "", Unknown, "as in `[[gemm]]`, of 8-bit matmuls. Those without a table are estimated from `[[gemm]]`, as are those of other element types";
        "weight_gradient" Flag, "", Required, "matmuls over the rows of an expert; otherwise rows times matrices";
        "result" Dtype, "", Unknown, "element type of weight gradients; default: `dtype`, in 8 bits `bf16`";
        "rows" GROUPED_ROWS, "", Required, "measured shapes: experts, rows of an expert, and the sizes of its matrix";
    }),
    section!(array "conv" "Measured convolutions, as the equivalent matmuls." {
        "source" Text, "", Required, "where the rows come from";
        "dtype" Dtype, "", Required, "element type";
        "rows" GEMM_ROWS, "", Required, "measured shapes";
    }),
    section!(array "attention" "Measured fused attention." {
        "source" Text, "", Required, "where the rows come from";
        "dtype" Dtype, "", Required, "element type";
        "causal" Flag, "", Required, "causal mask";
        "mask" Flag, "", Is("false"), "mask in a tensor, as transformers has for sliding windows; without such a table, its attention is priced like that without a mask";
        "backward" Flag, "", Required, "backward kernel";
        "backend" Word(AttentionBackend::WORDS), "", Unknown, "library, as in `[[attention_backend]]`; without it, the one that PyTorch picks";
        "rows" ATTENTION_ROWS, "", Required, "measured shapes";
    }),
    section!(array "attention_backend" "Attention of a library that a job asks for (`train.attention_backend`)." {
        "source" Text, "", Required, "where the numbers come from";
        "backend" Word(AttentionBackend::WORDS), "", Required, "the library";
        "forward" Number(Rate), "", Required, "share of the peak, forward, for shapes without a table row";
        "backward" Number(Rate), "", Required, "the same, backward";
    }),
    section!(array "memory" "Measured memory-bound kernels." {
        "source" Text, "", Required, "where the rows come from";
        "class" Word(&MEMORY_CLASSES), "", Required, "class, as in `[efficiency.memory]`";
        "op" Text, "", Unknown, "only kernels whose name contains this; the longest name is preferred. Elementwise kernels whose operands have two types end with `promoted`, softmax on rows that do not all begin at multiples of 16 bytes with `unaligned`; a cast to a wider type is `cast_up`, and `_chunk_cat` without a cast `chunk_cat_no_cast`";
        "dtype" Dtype, "", Unknown, "only kernels on this element type";
        "columns" Integer(1, MAX), "", Unknown, "only kernels on rows of at most this many elements; the table with the fewest is preferred";
        "in_step" Flag, "", Is("false"), "measured within training steps, with the caches in the state that they have there";
        "bytes" Word(&["moved", "described", "expanded"]), "", Unknown, "how bytes were counted: moved (gradients in their stored type), described (all in the type that the kernel computes in), expanded (all operands in the shape of the result, also those that are broadcast); without it `described` for `in_step`";
        "rows" BYTES_ROWS, "", Required, "bytes read and written, and time";
    }),
    section!(array "collective" "Measured collectives, alone on the links." {
        "source" Text, "", Required, "where the rows come from";
        "kind" Word(KINDS), "", Required, "kind";
        "ranks" Integer(1, MAX), "", Required, "ranks";
        "nodes" Integer(1, MAX), "", Is("1"), "nodes that the ranks are spread over evenly";
        "dtype" Dtype, "", Unknown, "only payloads of this element type";
        "rows" BYTES_ROWS, "", Required, "bytes of the full side, and time";
        "nccl_rows" BYTES_ROWS, "", Is("[]"), "NCCL's own estimates in the same form, for comparison only";
    }),
];
