//! Routers and their losses.

use super::{Call, CpuKernel};
#[cfg(feature = "cuda")]
use super::{CudaCode, CudaKernel};
#[cfg(feature = "cuda")]
use crate::kernels::cuda::codegen;
use crate::kernels::error::OperandError;
use crate::kernels::route;
use shardlab_plan::ir::op;

impl CpuKernel for op::Route {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        route::route(call.whole()?, self)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::Route {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::kernel(|req, op| codegen::route::route(req, op, self))
    }
}

impl CpuKernel for op::RouteGrad {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        route::route_grad(call.whole()?, self)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::RouteGrad {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::kernel(|req, op| codegen::route::route_grad(req, op, self))
    }
}

impl CpuKernel for op::CountExperts {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        route::count_experts(call.whole()?)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::CountExperts {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::kernel(codegen::route::count_experts)
    }
}

impl CpuKernel for op::LoadBalance {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        route::load_balance(call.whole()?, self)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::LoadBalance {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::kernel(|req, op| codegen::balance::load_balance(req, op, self))
    }
}

impl CpuKernel for op::LoadBalanceGrad {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        route::load_balance_grad(call.whole()?, self)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::LoadBalanceGrad {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::kernel(|req, op| codegen::balance::load_balance_grad(req, op, self))
    }
}

impl CpuKernel for op::ZLoss {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        route::z_loss(call.whole()?, self.scale.0)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::ZLoss {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::kernel(|req, op| codegen::balance::z_loss(req, op, self.scale.0))
    }
}

impl CpuKernel for op::ZLossGrad {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        route::z_loss_grad(call.whole()?, self.scale.0)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::ZLossGrad {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::kernel(|req, op| codegen::balance::z_loss_grad(req, op, self.scale.0))
    }
}
