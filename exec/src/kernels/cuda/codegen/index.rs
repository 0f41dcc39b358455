//! Index arithmetic of generated kernels: where element `i` of one view is in another.
//!
//! An [`Index`] is the C expression of the first of a few adjacent elements (lanes), with what is
//! known about it: the distance between the lanes, a number that divides it, and whether it stays
//! within the kernel's own row. Shapes are constants of the generated code, so that divisions
//! become multiplications.

use super::CodegenError;
use crate::kernels::strides::{self, Dim, Dims};
use shardlab_plan::ir::Slot;

/// Position relative to the row that a block works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::kernels) enum Own {
    /// Some lanes' elements of the own row.
    Elem,
    /// One element of the own row: the column is in the variable `pick`.
    Pick,
    /// The own row's number.
    Row,
}

/// Position of a few elements.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::kernels) struct Index {
    /// Expression of the first lane.
    pub(in crate::kernels) code: String,
    /// Distance between lanes; 0 if they are all the same element.
    pub(in crate::kernels) step: usize,
    /// Number that divides `code`.
    pub(in crate::kernels) multiple: usize,
    /// Set while this is still a row of the kernel.
    pub(in crate::kernels) own: Option<Own>,
}

impl Index {
    pub(in crate::kernels) fn zero() -> Self {
        Self {
            code: "0".to_owned(),
            step: 0,
            multiple: 1 << 20,
            own: None,
        }
    }

    /// Makes `i`: the kernel's own elements.
    pub(in crate::kernels) fn elem(lanes: usize) -> Self {
        Self {
            code: "i".to_owned(),
            step: 1,
            multiple: lanes,
            own: Some(Own::Elem),
        }
    }

    /// Makes one element at a position given as C, outside the own row.
    pub(in crate::kernels) fn single(code: impl Into<String>) -> Self {
        Self {
            code: code.into(),
            step: 0,
            multiple: 1,
            own: None,
        }
    }

    /// Makes `r`: the kernel's own row.
    pub(in crate::kernels) fn row() -> Self {
        Self {
            code: "r".to_owned(),
            step: 0,
            multiple: 1,
            own: Some(Own::Row),
        }
    }

    /// Makes the element of the own row in column `pick`.
    pub(in crate::kernels) fn pick() -> Self {
        Self {
            code: "(base + pick)".to_owned(),
            step: 0,
            multiple: 1,
            own: Some(Own::Pick),
        }
    }

    /// Moves by a constant.
    pub(in crate::kernels) fn plus(self, n: usize) -> Self {
        if n == 0 {
            return self;
        }
        Self {
            code: format!("({} + {n}u)", self.code),
            multiple: gcd(self.multiple, n),
            own: None,
            ..self
        }
    }
}

/// Rows and columns that a kernel works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kernels) struct Domain {
    pub(in crate::kernels) rows: usize,
    pub(in crate::kernels) cols: usize,
}

pub(in crate::kernels) fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Returns the merged dimensions of a slot.
pub(in crate::kernels) fn dims(slot: &Slot) -> Dims {
    strides::merge(strides::dims(slot).into_iter())
}

/// Returns the number of elements from a slot's first to its last, including gaps.
pub(in crate::kernels) fn extent(slot: &Slot) -> usize {
    let reach = |d: &Dim| (d.n.max(1) - 1) * d.stride;
    let last: usize = dims(slot).iter().map(reach).sum();
    (last + 1).max(strides::numel(slot))
}

/// Returns the merged dimensions of a slot that is repeated over a larger shape.
pub(in crate::kernels) fn broadcast(slot: &Slot, to: &[u64]) -> Result<Dims, CodegenError> {
    let dims = strides::broadcast(slot, to).ok_or_else(|| {
        CodegenError::new(format!("{:?} does not broadcast to {to:?}", slot.shape))
    })?;
    Ok(strides::merge(dims.into_iter()))
}

pub(in crate::kernels) fn is_contiguous(dims: &Dims) -> bool {
    matches!(dims[..], [] | [Dim { stride: 1, .. }])
}

fn quotient(code: &str, by: usize) -> String {
    if by == 1 {
        code.to_owned()
    } else {
        format!("{code} / {by}u")
    }
}

/// Returns the element offset of the logical position `at` of a view.
pub(in crate::kernels) fn offset(
    at: &Index,
    dims: &Dims,
    lanes: usize,
    domain: Option<Domain>,
) -> Result<Index, CodegenError> {
    if let Some(d) = domain
        && let Some(own) = at.own
        && own != Own::Row
        && d.rows > 1
        && d.cols > 1
        && let [a, b] = dims[..]
        && (a.n, b.n) == (d.rows, d.cols)
    {
        if (a.stride, b.stride) == (1, 0) {
            return Ok(Index::row());
        }
        if (a.stride, b.stride) == (0, 1) {
            let pick = own == Own::Pick;
            return Ok(Index {
                code: if pick { "pick" } else { "c" }.to_owned(),
                step: usize::from(!pick),
                multiple: if pick { 1 } else { at.multiple },
                own: None,
            });
        }
    }
    match dims[..] {
        [] => Ok(Index::zero()),
        [Dim { stride: 1, .. }] => Ok(at.clone()),
        _ if dims.iter().all(|d| d.stride == 0) => Ok(Index::zero()),
        _ => general(at, dims, lanes),
    }
}

fn general(at: &Index, dims: &Dims, lanes: usize) -> Result<Index, CodegenError> {
    let last = dims[dims.len() - 1];
    let together = at.step == 0
        || at.step == 1 && last.n.is_multiple_of(lanes) && at.multiple.is_multiple_of(lanes);
    if lanes > 1 && !together {
        return Err(CodegenError::lanes());
    }
    let mut terms = Vec::new();
    let mut multiple = 0;
    let mut below = 1;
    for (k, d) in dims.iter().enumerate().rev() {
        if d.stride != 0 {
            let mut code = quotient(&at.code, below);
            if k > 0 {
                code = format!("({code}) % {}u", d.n);
            }
            let inner = if k + 1 == dims.len() {
                gcd(at.multiple, d.n)
            } else {
                1
            };
            multiple = gcd(multiple, d.stride * inner);
            terms.push(if d.stride == 1 {
                format!("({code})")
            } else {
                format!("({code}) * {}u", d.stride)
            });
        }
        below *= d.n;
    }
    terms.reverse();
    Ok(Index {
        code: format!("({})", terms.join(" + ")),
        step: at.step * last.stride,
        multiple,
        own: None,
    })
}

/// Returns the logical position at which a dense view holds the element `at` an offset.
pub(in crate::kernels) fn position(
    at: &Index,
    dims: &Dims,
    lanes: usize,
) -> Result<Index, CodegenError> {
    if is_contiguous(dims) {
        return Ok(at.clone());
    }
    let mut sorted: Vec<(Dim, usize)> = Vec::new();
    let mut below = 1;
    for d in dims.iter().rev() {
        sorted.push((*d, below));
        below *= d.n;
    }
    sorted.sort_by_key(|(d, _)| std::cmp::Reverse(d.stride));
    let mut expect = 1;
    for (d, _) in sorted.iter().rev() {
        if d.stride != expect {
            return Err(CodegenError::new(
                "a value with gaps is read by another view",
            ));
        }
        expect *= d.n;
    }
    let (inner, step) = sorted[sorted.len() - 1];
    let together = at.step == 0
        || at.step == 1 && inner.n.is_multiple_of(lanes) && at.multiple.is_multiple_of(lanes);
    if lanes > 1 && !together {
        return Err(CodegenError::lanes());
    }
    let mut terms = Vec::new();
    let mut multiple = 0;
    for (k, (d, logical)) in sorted.iter().enumerate() {
        let mut code = quotient(&at.code, d.stride);
        if k > 0 {
            code = format!("({code}) % {}u", d.n);
        }
        let known = if k + 1 == sorted.len() {
            gcd(at.multiple, d.n)
        } else {
            1
        };
        multiple = gcd(multiple, logical * known);
        terms.push(format!("({code}) * {logical}u"));
    }
    Ok(Index {
        code: format!("({})", terms.join(" + ")),
        step: at.step * step,
        multiple,
        own: None,
    })
}

#[cfg(test)]
pub(in crate::kernels) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Evaluates an expression for a position.
    pub(crate) fn eval(code: &str, i: u64) -> u64 {
        // The expressions know only +, *, /, %, brackets, unsigned literals and `i`.
        struct P<'a>(&'a [u8], usize, u64);
        impl P<'_> {
            fn skip(&mut self) {
                while self.1 < self.0.len() && self.0[self.1] == b' ' {
                    self.1 += 1;
                }
            }
            fn sum(&mut self) -> u64 {
                let mut x = self.product();
                loop {
                    self.skip();
                    if self.1 < self.0.len() && self.0[self.1] == b'+' {
                        self.1 += 1;
                        x += self.product();
                    } else {
                        return x;
                    }
                }
            }
            fn product(&mut self) -> u64 {
                let mut x = self.atom();
                loop {
                    self.skip();
                    let op = self.0.get(self.1).copied().unwrap_or(b' ');
                    if !b"*/%".contains(&op) {
                        return x;
                    }
                    self.1 += 1;
                    let y = self.atom();
                    x = match op {
                        b'*' => x * y,
                        b'/' => x / y,
                        _ => x % y,
                    };
                }
            }
            fn atom(&mut self) -> u64 {
                self.skip();
                match self.0[self.1] {
                    b'(' => {
                        self.1 += 1;
                        let x = self.sum();
                        self.skip();
                        assert_eq!(self.0[self.1], b')');
                        self.1 += 1;
                        x
                    }
                    b'i' => {
                        self.1 += 1;
                        self.2
                    }
                    _ => {
                        let mut x = 0;
                        while self.1 < self.0.len() && self.0[self.1].is_ascii_digit() {
                            x = x * 10 + u64::from(self.0[self.1] - b'0');
                            self.1 += 1;
                        }
                        if self.0.get(self.1) == Some(&b'u') {
                            self.1 += 1;
                        }
                        x
                    }
                }
            }
        }
        P(code.as_bytes(), 0, i).sum()
    }

    fn permuted(shape: &[usize], order: &[usize]) -> Dims {
        let mut stride = vec![0; shape.len()];
        let mut next = 1;
        for &k in order {
            stride[k] = next;
            next *= shape[k];
        }
        strides::merge(
            shape
                .iter()
                .zip(&stride)
                .map(|(&n, &stride)| Dim { n, stride }),
        )
    }

    proptest! {
        #[test]
        fn lanes_offsets_and_positions_agree_with_counting(
            shape in prop::collection::vec(1usize..6, 3),
            order in Just(vec![0usize, 1, 2]).prop_shuffle(),
            lanes in prop::sample::select(vec![1usize, 2, 4]),
        ) {
            let dims = permuted(&shape, &order);
            let n: usize = shape.iter().product();
            let at = Index::elem(lanes);
            if let Ok(off) = offset(&at, &dims, lanes, None)
                && n.is_multiple_of(lanes)
            {
                let back = Index { own: None, ..off.clone() };
                for i in (0..n).step_by(lanes) {
                    let first = eval(&off.code, i as u64) as usize;
                    prop_assert_eq!(first % off.multiple.max(1), 0);
                    for v in 0..lanes {
                        // Walk the shape to the logical position.
                        let (mut rest, mut want) = (i + v, 0);
                        for d in dims.iter().rev() {
                            want += rest % d.n * d.stride;
                            rest /= d.n;
                        }
                        prop_assert_eq!(first + v * off.step, want);
                    }
                    if let Ok(pos) = position(&Index { code: "i".into(), step: back.step, multiple: back.multiple, own: None }, &dims, lanes) {
                        for v in 0..lanes {
                            let there = eval(&pos.code, first as u64) as usize + v * pos.step;
                            prop_assert_eq!(there, i + v);
                        }
                    }
                }
            }
        }
    }
}
