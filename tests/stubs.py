"""Calls of a gRPC service by its descriptor, for tests that talk to a registry directly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from planaria.bootstrap.authorization import OPERATOR_CALLS, REGISTRY_CALLS


def stub_of(channel: grpc.aio.Channel, service: ServiceDescriptor) -> Any:
    """An object with each of the service's calls as an attribute."""
    return SimpleNamespace(**{method.name: _call(channel, method) for method in service.methods})


def RegistryStub(channel: grpc.aio.Channel) -> Any:  # noqa: N802 (as generated code has it)
    return stub_of(channel, REGISTRY_CALLS)


def OperatorStub(channel: grpc.aio.Channel) -> Any:  # noqa: N802
    return stub_of(channel, OPERATOR_CALLS)


def _call(channel: grpc.aio.Channel, method: MethodDescriptor) -> Any:
    kind = "_".join(
        "stream" if streaming else "unary"
        for streaming in (method.client_streaming, method.server_streaming)
    )
    return getattr(channel, kind)(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
