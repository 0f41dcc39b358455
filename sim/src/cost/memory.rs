//! Memory-bound kernels: measured times by bytes moved, or else bytes over the class's share of the
//! bandwidth.

use super::{Price, table};
use crate::hardware::{Counted, MemoryClass, MemoryTable, Profile};
use shardlab_plan::ir::Kernel;
use shardlab_plan::units::Bytes;
use std::borrow::Cow;
use std::cmp::Reverse;

pub(super) fn price(kernel: &Kernel, moved: Bytes, profile: &Profile) -> Price {
    let Some(class) = MemoryClass::of(&kernel.class) else {
        return Price {
            us: 0.0,
            measured: false,
        };
    };
    let name = name(kernel, class);
    let columns = columns(kernel);
    let fits = |t: &&MemoryTable| {
        t.class == class
            && t.op.as_deref().is_none_or(|op| name.contains(op))
            && t.dtype.is_none_or(|d| d == kernel.dtype)
            && t.columns
                .is_none_or(|most| columns.is_some_and(|n| n <= most))
    };
    // The most specific table is used, and the first of equal ones.
    let rank = |t: &MemoryTable| {
        let op = t.op.as_ref().map_or(0, String::len);
        (op, t.dtype.is_some(), t.columns.map(Reverse))
    };
    let found = profile
        .memory
        .iter()
        .filter(fits)
        .reduce(|best, t| if rank(t) > rank(best) { t } else { best });
    let bytes = match found.map(MemoryTable::counted) {
        Some(Counted::Described) => kernel.read.0 + kernel.written.0,
        Some(Counted::Expanded) => expanded(kernel).unwrap_or(moved.0),
        Some(Counted::Moved) | None => moved.0,
    };
    let shortest = profile.device.min_kernel_us;
    let gbps = profile.device.memory_gbps * profile.efficiency.memory[&class];
    // Bytes per microsecond at a quarter of the bandwidth.
    let fast = profile.device.memory_gbps * 1e3 / 4.0;
    let beyond = table::Beyond {
        shortest,
        fast,
        usual: gbps * 1e3,
    };
    let row = found.and_then(|t| table::of_memory(&t.rows, bytes, beyond));
    if let Some((us, measured)) = row {
        return Price {
            us: us.max(cold(found, bytes, profile)),
            measured,
        };
    }
    let arithmetic =
        kernel.flops.0 as f64 / (profile.peak_flops(shardlab_plan::ir::DType::F32) * 0.5) * 1e6;
    let us = shortest + (bytes as f64 / gbps / 1e3).max(arithmetic);
    Price {
        us,
        measured: false,
    }
}

/// Returns the name of a kernel for tables.
fn name(kernel: &Kernel, class: MemoryClass) -> Cow<'_, str> {
    // A widening cast stores more than it loads and runs at half the rate of a narrowing one.
    if class == MemoryClass::Copy && kernel.written > kernel.read {
        return "cast_up".into();
    }
    // Without a cast, `_chunk_cat` copies bytes, at nearly twice the rate.
    if kernel.name == "chunk_cat" && kernel.written == kernel.read {
        return "chunk_cat_no_cast".into();
    }
    // Elements of operands with two types are converted one by one.
    if class == MemoryClass::Strided && promotes(kernel) {
        return format!("{} promoted", kernel.name).into();
    }
    if is_softmax(class)
        && columns(kernel).is_some_and(|n| !(n * kernel.dtype.size()).is_multiple_of(16))
    {
        return format!("{} unaligned", kernel.name).into();
    }
    kernel.name.as_str().into()
}

fn is_softmax(class: MemoryClass) -> bool {
    matches!(class, MemoryClass::Softmax | MemoryClass::SoftmaxBackward)
}

/// Returns the number of elements per row of the first operand.
fn columns(kernel: &Kernel) -> Option<u64> {
    kernel.body.first()?.inputs.first()?.shape.last().copied()
}

/// Returns the bytes of all operands of a kernel with one operation, in the shape of the result.
fn expanded(kernel: &Kernel) -> Option<u64> {
    let [only] = &kernel.body[..] else {
        return None;
    };
    let result = only.outputs.first()?;
    let elements: u64 = result.shape.iter().product();
    let operands = only.inputs.iter().chain([result]);
    Some(operands.map(|slot| elements * slot.dtype.size()).sum())
}

/// Returns whether the operands of the first operation have different types.
fn promotes(kernel: &Kernel) -> bool {
    let first = kernel.body.first().map(|op| op.inputs.as_slice());
    first.is_some_and(|inputs| inputs.windows(2).any(|pair| pair[0].dtype != pair[1].dtype))
}

/// Returns the time for operands that are not in the cache. Tables come from loops over the same
/// operands, which stay in the cache if they are small. Within a step, operands come from memory,
/// at the rate of the table's largest size.
fn cold(table: Option<&MemoryTable>, bytes: u64, profile: &Profile) -> f64 {
    let in_step = table.is_some_and(|t| t.in_step);
    match table.and_then(|t| t.rows.last()) {
        Some(&(most, us)) if !in_step && bytes <= 2 * (profile.device.l2_mib << 20) => {
            profile.device.min_kernel_us + us * bytes as f64 / most as f64
        }
        _ => 0.0,
    }
}
