//! Operands of an operation: their number, and how each relates to the rows that the operation
//! works on.

use smallvec::SmallVec;

/// How much of an operand one row of the operation needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// The same number of elements as the operation works on, row by row. Elementwise operations
    /// broadcast inputs with fewer elements.
    Full,
    /// The same as [`Extent::Full`], but never broadcast.
    Exact,
    /// One element per row: a statistic, an id, a label.
    PerRow,
    /// One element per column, needed for every row: a norm's parameter.
    PerColumn,
    /// One element for all rows.
    Scalar,
    /// A part of the result: any size that is a multiple of the rows.
    Part,
    /// Not read: only refers to memory that is overwritten.
    Ignored,
    /// Any tensor: library kernels and reductions check their operands themselves.
    Any,
}

/// One operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand {
    /// Name in messages.
    pub name: &'static str,
    /// How much of it a row needs.
    pub extent: Extent,
}

/// The operand whose last dimension an operation reduces or indexes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduced {
    /// An input.
    Input(usize),
    /// An output.
    Output(usize),
}

/// The operands of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// Inputs, optional ones last.
    pub inputs: SmallVec<[Operand; 8]>,
    /// Number of inputs that may be missing.
    pub optional_inputs: usize,
    /// Whether the last input may be repeated.
    pub variadic: bool,
    /// Outputs, optional ones last.
    pub outputs: SmallVec<[Operand; 4]>,
    /// Number of outputs that may be missing.
    pub optional_outputs: usize,
    /// The operand whose rows are reduced or indexed; `None` for elementwise and library kernels.
    pub reduced: Option<Reduced>,
}

impl Signature {
    /// Creates a signature without optional operands.
    #[must_use]
    pub fn new(inputs: &[Operand], outputs: &[Operand]) -> Self {
        Self {
            inputs: SmallVec::from_slice(inputs),
            optional_inputs: 0,
            variadic: false,
            outputs: SmallVec::from_slice(outputs),
            optional_outputs: 0,
            reduced: None,
        }
    }

    /// Makes the last `n` inputs optional.
    #[must_use]
    pub(crate) fn optional_inputs(mut self, n: usize) -> Self {
        self.optional_inputs = n;
        self
    }

    /// Makes the last `n` outputs optional.
    #[must_use]
    pub(crate) fn optional_outputs(mut self, n: usize) -> Self {
        self.optional_outputs = n;
        self
    }

    /// Allows the last input to be repeated.
    #[must_use]
    pub(crate) fn variadic(mut self) -> Self {
        self.variadic = true;
        self
    }

    /// Sets the operand whose rows are reduced.
    #[must_use]
    pub fn reduces(mut self, operand: Reduced) -> Self {
        self.reduced = Some(operand);
        self
    }

    /// Returns the `n`-th input. All repeated inputs are the last one.
    #[must_use]
    pub fn input(&self, n: usize) -> Option<&Operand> {
        match self.inputs.get(n) {
            None if self.variadic => self.inputs.last(),
            found => found,
        }
    }

    /// Returns the minimum and maximum number of inputs.
    #[must_use]
    pub fn input_count(&self) -> (usize, usize) {
        let all = self.inputs.len();
        let most = if self.variadic { usize::MAX } else { all };
        (all - self.optional_inputs, most)
    }

    /// Returns the minimum and maximum number of outputs.
    #[must_use]
    pub fn output_count(&self) -> (usize, usize) {
        let all = self.outputs.len();
        (all - self.optional_outputs, all)
    }

    /// Returns the number of inputs that the arithmetic reads: those that are not
    /// [`Extent::Ignored`].
    #[must_use]
    pub fn used_inputs(&self) -> usize {
        let used = |o: &&Operand| o.extent != Extent::Ignored;
        self.inputs.iter().filter(used).count()
    }
}

/// Creates an operand.
pub(super) const fn operand(name: &'static str, extent: Extent) -> Operand {
    Operand { name, extent }
}

/// Creates an operand of [`Extent::Any`].
pub(super) const fn any(name: &'static str) -> Operand {
    operand(name, Extent::Any)
}

/// Creates an operand of [`Extent::Full`].
pub(super) const fn full(name: &'static str) -> Operand {
    operand(name, Extent::Full)
}
