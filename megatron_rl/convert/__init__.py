from ..machine import prepare

prepare()
