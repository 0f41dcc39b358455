//! Updates of router biases that balance the load of experts, as with torchtitan's
//! `load_balance_coeff`.

use super::super::error::OperandError;
use super::super::operands::same;
use super::super::view::View;
use crate::operand::RawRange;
use shardlab_plan::ir::DType;

/// Moves the biases of routers by counts of choices. Reads are biases and counts of each router,
/// writes the biases.
pub(super) fn update(
    speed: f32,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    same("biases and counts", 2 * writes.len(), reads.len())?;
    for (pair, written) in reads.chunks_exact(2).zip(writes) {
        let [bias, counts] = [View::flat(pair[0])?, View::flat(pair[1])?];
        for of in [&bias, &counts] {
            if of.dtype != DType::F32 {
                return Err(OperandError::Type(of.dtype));
            }
        }
        same("the counts", bias.numel, counts.numel)?;
        if bias != View::flat(*written)? {
            let message = "a bias is not written where it is read";
            return Err(OperandError::Shape(message.to_owned()));
        }
        router(speed, &bias, &counts);
    }
    Ok(())
}

/// Moves the biases of one router.
fn router(speed: f32, bias: &View, counts: &View) {
    let n = bias.numel;
    let (mut values, mut counted) = (vec![0.0; n], vec![0.0; n]);
    bias.load(0, &mut values);
    counts.load(0, &mut counted);
    // Whole numbers, which float64 adds and multiplies without rounding.
    let total: f64 = counted.iter().map(|c| f64::from(*c)).sum();
    let direction = |count: f32| {
        let missing = total - n as f64 * f64::from(count);
        f32::from(missing > 0.0) - f32::from(missing < 0.0)
    };
    let directions: f32 = counted.iter().map(|c| direction(*c)).sum();
    let mean = speed * directions / n as f32;
    for (value, count) in values.iter_mut().zip(&counted) {
        *value += speed * direction(*count) - mean;
    }
    bias.store(0, &values);
}
