//! Norms of a decoder.

use crate::config::{Model, Norm as Kind};
use crate::graph::ValueId;
use crate::ir::{DType, Init, ModuleId, ModuleKind, OpKind, Real, op};
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Names, Order};
use crate::models::implementation;

/// A norm over the last dimension.
#[derive(Clone, Copy)]
pub(super) struct Norm {
    kind: Kind,
    module: ModuleId,
    /// `None` for norms without parameters.
    layer: Option<Layer>,
}

impl Norm {
    /// Declares a norm of the model's kind.
    pub(super) fn new(
        d: &mut Declare,
        parent: ModuleId,
        names: Names<'_>,
        width: u64,
        m: &Model,
        order: Order,
    ) -> Self {
        let kind = m.options.norm;
        let bias = matches!(kind, Kind::Layer | Kind::LayerUnitOffset);
        let init = match kind {
            Kind::RmsUnitOffset | Kind::LayerUnitOffset => Init::Zeros,
            _ => Init::Ones,
        };
        if matches!(kind, Kind::LayerNoWeight | Kind::RmsNoWeight) {
            let module = d.module(parent, names.0, ModuleKind::Norm);
            let layer = None;
            return Self {
                kind,
                module,
                layer,
            };
        }
        let layer = d.norm_from(parent, names, width, bias, order, init);
        Self {
            kind,
            module: layer.module(),
            layer: Some(layer),
        }
    }

    /// Returns its module.
    pub(super) fn module(self) -> ModuleId {
        self.module
    }

    /// Returns the layer with its parameters, if it has any.
    pub(super) fn layer(self) -> Option<Layer> {
        self.layer
    }

    /// Normalizes the rows of `x`.
    pub(super) fn apply(self, b: &mut Builder<'_>, x: ValueId) -> ValueId {
        match (self.layer, self.kind) {
            (Some(layer), Kind::Rms | Kind::RmsUnitOffset) if b.is_transformers() => {
                let w = b.weight(layer);
                implementation::rms_norm(b, self.module, x, w, self.kind)
            }
            (layer, Kind::Layer | Kind::LayerNoBias | Kind::LayerNoWeight)
                if implementation::has_own_code(b) =>
            {
                let w = layer.map(|layer| b.weight(layer));
                implementation::layer_norm(b, self.module, x, w)
            }
            (Some(layer), Kind::Rms) => b.rms_norm(layer, x),
            (Some(layer), Kind::Layer | Kind::LayerNoBias) => b.layer_norm(layer, x),
            (Some(layer), Kind::RmsUnitOffset) => {
                let w = self.factor(b, layer);
                b.rms_norm_by(self.module, x, w)
            }
            (Some(layer), _) => {
                let w = self.factor(b, layer);
                let bias = b.bias(layer);
                b.layer_norm_by(self.module, x, w, bias)
            }
            (None, kind) => {
                let width = b.g.value(x).cols();
                let ones = b.ones(self.module, width);
                match kind {
                    Kind::RmsNoWeight => b.rms_norm_by(self.module, x, ones),
                    _ => b.layer_norm_by(self.module, x, ones, None),
                }
            }
        }
    }

    /// Computes `1 + w`.
    fn factor(self, b: &mut Builder<'_>, layer: Layer) -> ValueId {
        let w = b.weight(layer);
        let shift = OpKind::Shift(op::Shift { by: Real(1.0) });
        b.within(self.module, |b| b.g.unary(shift, w))
    }
}

impl Builder<'_> {
    /// Adds a table of ones for a module, in the type of the activations. The module casts it: an
    /// op of another module would leave the block, and FSDP would gather it again.
    pub(super) fn ones(&mut self, module: ModuleId, width: u64) -> ValueId {
        let ones = self.constant("ones", &[width], DType::F32, false);
        self.within(module, |b| b.as_activation(ones))
    }
}
